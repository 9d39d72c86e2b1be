// Marks at the end of a message that name the class of torch_dynemb.errors for Python to raise.
//
//   DYNEMB_CHECK(fits, "dynemb::", op, ": the table is full: erase ids", kNoRoomError);
//
// torch turns any exception of an op into a RuntimeError with its text, so the class has to be part
// of the text. torch_dynemb/_library/typed_errors.py removes the mark.
#pragma once

namespace dynemb {

inline constexpr const char* kNoRoomError = " [NoRoomError]";
inline constexpr const char* kHostMemoryError = " [HostMemoryError]";
inline constexpr const char* kDeviceMemoryError = " [DeviceMemoryError]";
inline constexpr const char* kDiskFullError = " [DiskFullError]";
inline constexpr const char* kDamagedStoreError = " [DamagedStoreError]";
inline constexpr const char* kUnsupportedFormatError = " [UnsupportedFormatError]";
inline constexpr const char* kInUseError = " [InUseError]";
inline constexpr const char* kForkedProcessError = " [ForkedProcessError]";

}  // namespace dynemb
