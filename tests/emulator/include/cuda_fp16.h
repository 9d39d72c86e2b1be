// Empty: the kernels compute in float.
#pragma once
