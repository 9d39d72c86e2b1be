// Reader of JSON (RFC 8259): manifests and headers of safetensors files.

#pragma once

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <variant>
#include <vector>

namespace dynemb::serving {

// A value of a JSON text. Accessors throw std::runtime_error for values of another kind.
class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::map<std::string, Json>;

  Json() = default;
  template <typename Value>
  explicit Json(Value value) : value_(std::move(value)) {}

  // Throws std::runtime_error if the text is invalid.
  static Json parse(std::string_view text);

  bool is_null() const { return std::holds_alternative<std::nullptr_t>(value_); }
  bool is_text() const { return std::holds_alternative<std::string>(value_); }
  bool is_object() const { return std::holds_alternative<Object>(value_); }
  bool is_array() const { return std::holds_alternative<Array>(value_); }
  const std::string& text() const { return as<std::string>("a string"); }
  int64_t integer() const { return as<int64_t>("a whole number of 64 bits"); }
  bool truth() const { return as<bool>("true or false"); }
  double number() const {
    if (const auto* whole = std::get_if<int64_t>(&value_)) return static_cast<double>(*whole);
    return as<double>("a number");
  }
  const Array& array() const { return as<Array>("a list"); }
  const Object& object() const { return as<Object>("an object"); }
  bool has(const std::string& key) const { return object().count(key) != 0; }
  const Json& at(const std::string& key) const {
    const auto found = object().find(key);
    if (found == object().end())
      throw std::runtime_error("JSON: the key \"" + key + "\" is missing");
    return found->second;
  }

 private:
  template <typename Value>
  const Value& as(const char* kind) const {
    const auto* found = std::get_if<Value>(&value_);
    if (found == nullptr) throw std::runtime_error(std::string("expected ") + kind);
    return *found;
  }

  std::variant<std::nullptr_t, bool, int64_t, double, std::string, Array, Object> value_ = nullptr;
};

// A text in quotes, with JSON escapes. Does not take a view: calls with a std::string would find
// std::quoted, which escapes differently.
inline std::string quoted(const std::string& text) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string result = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') {
      result += '\\';
      result += letter;
    } else if (static_cast<unsigned char>(letter) < 0x20) {
      result += std::string("\\u00") + kDigits[letter >> 4] + kDigits[letter & 15];
    } else {
      result += letter;
    }
  }
  return result + '"';
}

namespace detail {

class JsonParser {
 public:
  explicit JsonParser(std::string_view text) : text_(text) {}

  Json whole() {
    Json value = read(0);
    skip_blanks();
    if (at_ != text_.size()) fail("something follows the value");
    return value;
  }

 private:
  static constexpr int kDeepest = 64;

  [[noreturn]] void fail(const std::string& why) const {
    throw std::runtime_error("JSON: " + why + " at byte " + std::to_string(at_));
  }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void skip_blanks() {
    while (peek() != '\0' && std::string_view(" \t\r\n").find(peek()) != std::string_view::npos) {
      ++at_;
    }
  }
  void expect(char letter) {
    if (peek() != letter) fail(std::string("expected '") + letter + "'");
    ++at_;
  }
  bool word(std::string_view expected) {
    if (text_.substr(at_, expected.size()) != expected) return false;
    at_ += expected.size();
    return true;
  }

  Json read(int depth) {
    if (depth > kDeepest) fail("too deep");
    skip_blanks();
    if (peek() == '{') return object(depth);
    if (peek() == '[') return array(depth);
    if (peek() == '"') return Json(string());
    if (word("null")) return Json();
    if (word("true")) return Json(true);
    if (word("false")) return Json(false);
    return number();
  }

  Json object(int depth) {
    Json::Object values;
    expect('{');
    for (skip_blanks(); peek() != '}'; skip_blanks()) {
      if (!values.empty()) expect(','), skip_blanks();
      std::string key = string();
      skip_blanks();
      expect(':');
      values.insert_or_assign(std::move(key), read(depth + 1));
    }
    ++at_;
    return Json(std::move(values));
  }

  Json array(int depth) {
    Json::Array values;
    expect('[');
    for (skip_blanks(); peek() != ']'; skip_blanks()) {
      if (!values.empty()) expect(',');
      values.push_back(read(depth + 1));
    }
    ++at_;
    return Json(std::move(values));
  }

  Json number() {
    const size_t begin = at_;
    if (peek() == '-') ++at_;
    const size_t first = at_;
    if (digits() == 0) at_ = begin, fail("expected a value");
    if (text_[first] == '0' && at_ > first + 1) fail("expected no zero before a number");
    bool whole = true;
    if (peek() == '.') {
      ++at_, whole = false;
      if (digits() == 0) fail("expected a digit");
    }
    if (peek() == 'e' || peek() == 'E') {
      ++at_, whole = false;
      if (peek() == '+' || peek() == '-') ++at_;
      if (digits() == 0) fail("expected a digit");
    }
    const std::string number(text_.substr(begin, at_ - begin));
    int64_t value = 0;
    const char* end = number.data() + number.size();
    // a whole number beyond 64 bits is left to the floats
    if (whole && std::from_chars(number.data(), end, value).ec == std::errc()) return Json(value);
    return Json(std::strtod(number.c_str(), nullptr));  // infinite if it is too large
  }

  // Skips digits; returns their number.
  size_t digits() {
    const size_t begin = at_;
    while (peek() >= '0' && peek() <= '9') ++at_;
    return at_ - begin;
  }

  std::string string() {
    std::string result;
    expect('"');
    while (peek() != '"') {
      if (at_ >= text_.size()) fail("a string does not end");
      const char letter = text_[at_++];
      if (letter != '\\') {
        result += letter;
        continue;
      }
      const char escaped = peek();
      ++at_;
      if (escaped == 'u') {
        append_utf8(result, code_point());
        continue;
      }
      static constexpr std::string_view kEscapes = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
      const size_t place = kEscapes.find(escaped);
      if (place == std::string_view::npos) fail("an unknown escape");
      result += kMeanings[place];
    }
    ++at_;
    return result;
  }

  uint32_t four_digits() {
    uint32_t value = 0;
    for (int digit = 0; digit < 4; ++digit, ++at_) {
      const size_t place = std::string_view("0123456789abcdef").find(peek() | 0x20);
      if (place == std::string_view::npos) fail("expected four hexadecimal digits");
      value = value * 16 + static_cast<uint32_t>(place);
    }
    return value;
  }

  uint32_t code_point() {
    const uint32_t first = four_digits();
    if (first < 0xd800 || first >= 0xdc00 || !word("\\u")) return first;
    return 0x10000 + ((first - 0xd800) << 10) + (four_digits() - 0xdc00);
  }

  static void append_utf8(std::string& out, uint32_t code) {
    const auto tail = [&](int shift) { out += static_cast<char>(0x80 | ((code >> shift) & 0x3f)); };
    if (code < 0x80) {
      out += static_cast<char>(code);
    } else if (code < 0x800) {
      out += static_cast<char>(0xc0 | (code >> 6)), tail(0);
    } else if (code < 0x10000) {
      out += static_cast<char>(0xe0 | (code >> 12)), tail(6), tail(0);
    } else {
      out += static_cast<char>(0xf0 | (code >> 18)), tail(12), tail(6), tail(0);
    }
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace detail

inline Json Json::parse(std::string_view text) { return detail::JsonParser(text).whole(); }

}  // namespace dynemb::serving
