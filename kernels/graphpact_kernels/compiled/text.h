// The text of an error. It is made without streams: if a toolchain links the C++ library statically, a stream in
// this library uses tables of the library that Python has loaded, and crashes.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace graphpact {

inline std::string word(const char* text) { return text; }
inline std::string word(const std::string& text) { return text; }
inline std::string word(int64_t number) { return std::to_string(number); }
inline std::string word(at::ScalarType type) { return c10::toString(type); }
inline std::string word(at::IntArrayRef numbers) {
  std::string joined = "[";
  for (const int64_t number : numbers) {
    joined += (joined.size() > 1 ? ", " : "") + std::to_string(number);
  }
  return joined + "]";
}

// Return the words of a message as one string.
template <typename... Words>
std::string text(const Words&... words) {
  return (std::string() + ... + word(words));
}

}  // namespace graphpact
