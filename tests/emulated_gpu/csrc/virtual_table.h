// Replaces virtual functions of one object, for what TensorFlow has no hook for.
//
// The object is given a copy of its class's table, with other functions in some places. The layout is that of the Itanium
// C++ ABI, which GCC and Clang have on Linux.

#ifndef TESTS_EMULATED_GPU_CSRC_VIRTUAL_TABLE_H_
#define TESTS_EMULATED_GPU_CSRC_VIRTUAL_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace emulated_gpu {

constexpr size_t kTable = 128;  // entries; more than any class here has, and what lies behind is never called

template <typename Member>
size_t PlaceOf(Member member) {
  uintptr_t place;
  std::memcpy(&place, &member, sizeof(place));
  return (place - 1) / sizeof(void*);
}

// The object's own copy of its table.
inline void** CopyTable(void* object) {
  void** const copy = new void*[kTable + 2];
  std::memcpy(copy, *static_cast<void***>(object) - 2, (kTable + 2) * sizeof(void*));  // with the type information before it
  return copy + 2;
}

inline void SetTable(void* object, void** table) { *static_cast<void***>(object) = table; }

template <typename Function>
void Replace(void** table, size_t place, Function** original, Function* by) {
  if (*original == nullptr) *original = reinterpret_cast<Function*>(table[place]);
  table[place] = reinterpret_cast<void*>(by);
}

}  // namespace emulated_gpu

#endif  // TESTS_EMULATED_GPU_CSRC_VIRTUAL_TABLE_H_
