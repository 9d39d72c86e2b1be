#pragma once

#include "emulator/runtime_api.h"
