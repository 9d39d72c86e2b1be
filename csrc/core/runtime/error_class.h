// Marks that end a message and name the class of torch_dynemb.errors that Python raises for it.
//
//   DYNEMB_CHECK(fits, "dynemb::", op, ": the table is full: erase ids", kNoRoomError);
//
// torch turns whatever an op throws into a RuntimeError with its text, so only text can say more.
// torch_dynemb/_library/typed_errors.py takes the mark out again.
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
