// The Open Inference Protocol, version 2: requests and answers in JSON, with tensors in binary.
// inference_protocol.py does the same for the Python server, in the same words.

#pragma once

#include <ATen/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "http_server.h"
#include "json_tensors.h"

namespace inference_protocol {

using dynemb::serving::Input;
using dynemb::serving::quoted;
using json_tensors::field;
using json_tensors::fields_of;
using simdjson::dom::element;
using simdjson::dom::object;

// Length of the JSON text; binary tensors follow it.
constexpr char kLengthHeader[] = "Inference-Header-Content-Length";

// A model under its name in the protocol.
struct NamedModel {
  std::string name, version;
  std::vector<Input> inputs, outputs;
  std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)> run;
  std::function<http::Response()> ready;
};

inline const std::string& datatype(at::ScalarType dtype) {
  static const std::map<at::ScalarType, std::string> kNames = {
      {at::kBool, "BOOL"},  {at::kByte, "UINT8"}, {at::kChar, "INT8"}, {at::kShort, "INT16"},
      {at::kInt, "INT32"},  {at::kLong, "INT64"}, {at::kHalf, "FP16"}, {at::kBFloat16, "BF16"},
      {at::kFloat, "FP32"}, {at::kDouble, "FP64"}};
  return kNames.at(dtype);
}

inline http::Response server_metadata(const std::string& version) {
  return {"{\"name\":\"torch_dynemb\",\"version\":" + quoted(version) +
          ",\"extensions\":[\"binary_tensor_data\"]}"};
}

namespace detail {

[[noreturn]] inline void refuse(const std::string& owner, const std::string& why) {
  throw std::invalid_argument(owner + ": " + why);
}

inline std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "'" : ", '") + name + '\'';
  return '[' + text + ']';
}

inline void describe(const std::vector<Input>& tensors, std::ostream& out) {
  for (size_t number = 0; number < tensors.size(); ++number) {
    const Input& of = tensors[number];
    out << (number == 0 ? "" : ",") << "{\"name\":" << quoted(of.name)
        << ",\"datatype\":" << quoted(datatype(of.dtype)) << ",\"shape\":[";
    for (size_t dim = 0; dim < of.sizes.size(); ++dim) {
      const auto& size = of.sizes[dim];
      out << (dim == 0 ? "" : ",") << (size && size->symbol.empty() ? size->plus : -1);
    }
    out << "]}";
  }
}

inline simdjson::dom::array list_of(const object& fields, const std::string& key) {
  simdjson::dom::array list;
  if (fields.at_key(key).get(list)) refuse(key, "expected a list");
  return list;
}

inline std::string text_of(const object& fields, const std::string& key, const std::string& owner) {
  std::string_view text;
  if (fields.at_key(key).get(text)) refuse(owner + '.' + key, "expected a string");
  return std::string(text);
}

inline std::vector<int64_t> shape_of(const object& fields, const std::string& owner) {
  const auto refuse_shape = [&] { refuse(owner + ".shape", "expected a list of sizes"); };
  std::vector<int64_t> shape;
  simdjson::dom::array sizes;
  if (fields.at_key("shape").get(sizes)) refuse_shape();
  for (const element size : sizes) {
    int64_t number;
    if (size.get(number) || number < 0) refuse_shape();
    shape.push_back(number);
  }
  return shape;
}

// The number of elements; the largest number if there are more.
inline int64_t elements(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  bool is_more = false;
  for (const int64_t size : shape) is_more |= __builtin_mul_overflow(count, size, &count);
  const bool is_empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  return is_empty ? 0 : is_more ? std::numeric_limits<int64_t>::max() : count;
}

// The parameters of a request, if any; a client may send others than those that are read.
inline std::optional<object> parameters_of(const object& fields, const std::string& owner) {
  const auto parameters = field(fields, "parameters");
  if (!parameters) return std::nullopt;
  return json_tensors::object_of(parameters, owner + ".parameters");
}

// A field of the parameters; none: they lack it.
inline std::optional<element> parameter(const std::optional<object>& parameters,
                                        std::string_view key) {
  return parameters ? field(*parameters, key) : std::nullopt;
}

inline bool flag_of(const std::optional<object>& parameters, const std::string& key,
                    const std::string& owner, bool otherwise = false) {
  const auto value = parameter(parameters, key);
  bool flag = otherwise;
  if (value && value->get(flag)) refuse(owner + ".parameters." + key, "expected true or false");
  return flag;
}

inline at::Tensor tensor_in(std::string_view data, at::ScalarType dtype, int64_t count,
                            const std::string& owner) {
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  if (static_cast<int64_t>(data.size()) / item != count || data.size() % item != 0) {
    refuse(owner, "expected " + std::to_string(count) + " elements of " + std::to_string(item) +
                      " bytes for its shape, not " + std::to_string(data.size()) + " bytes");
  }
  at::Tensor values = at::empty({count}, dtype);
  if (!data.empty()) std::memcpy(values.mutable_data_ptr(), data.data(), data.size());
  if (dtype == at::kBool &&
      std::any_of(data.begin(), data.end(), [](char byte) { return (byte & ~1) != 0; })) {
    refuse(owner, "expected bytes 0 and 1");
  }
  return values;
}

// The tensor of an entry of "inputs"; takes its bytes from `binary`.
inline at::Tensor input_of(const object& fields, const Input& wanted, std::string_view& binary) {
  const std::string owner = "inputs." + wanted.name;
  const std::string& type = datatype(wanted.dtype);
  std::string_view given;
  if (fields.at_key("datatype").get(given) || given != type) {
    refuse(owner, "expected datatype " + type);
  }
  const std::vector<int64_t> shape = shape_of(fields, owner);
  const int64_t count = elements(shape);
  const auto binary_size = parameter(parameters_of(fields, owner), "binary_data_size");
  const auto data = field(fields, "data");
  if (!binary_size) {
    if (!data) refuse(owner, "expected data, or binary_data_size of its parameters");
    const at::Tensor values = json_tensors::tensor_of(*data, wanted.dtype, {0}, owner);
    if (values.numel() != count) {
      refuse(owner, "expected " + std::to_string(count) + " numbers for its shape");
    }
    return values.reshape(shape);
  }
  int64_t size = -1;
  if (data || binary_size->get(size) || size < 0 || size > static_cast<int64_t>(binary.size())) {
    refuse(owner, "expected binary_data_size bytes after the JSON text");
  }
  const at::Tensor values = tensor_in(binary.substr(0, size), wanted.dtype, count, owner);
  binary.remove_prefix(size);
  return values.reshape(shape);
}

inline std::vector<at::Tensor> inputs_of(const object& request, const std::vector<Input>& known,
                                         std::string_view binary) {
  std::vector<std::string> names;
  for (const Input& input : known) names.push_back(input.name);
  std::vector<at::Tensor> found(known.size());
  size_t number = 0;
  for (const element entry : list_of(request, "inputs")) {
    const std::string owner = "inputs[" + std::to_string(number++) + ']';
    const object fields =
        fields_of(entry, {"name", "shape", "datatype", "parameters", "data"}, owner);
    const std::string name = text_of(fields, "name", owner);
    const auto place =
        static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
    if (place == names.size() || found[place].defined()) {
      refuse(owner, "expected one each of " + listed(names) + ", not '" + name + '\'');
    }
    found[place] = input_of(fields, known[place], binary);
  }
  for (size_t place = 0; place < names.size(); ++place) {
    if (!found[place].defined()) {
      throw std::invalid_argument("inputs lacks '" + names[place] + '\'');
    }
  }
  if (!binary.empty()) {
    refuse("the request", std::to_string(binary.size()) + " bytes follow its binary tensors");
  }
  return found;
}

// The outputs to send, by their numbers, and whether each is sent in binary.
inline std::vector<std::pair<size_t, bool>> wanted_outputs(const object& request,
                                                           const std::vector<Input>& known) {
  const bool all_binary =
      flag_of(parameters_of(request, "the request"), "binary_data_output", "the request");
  std::vector<std::pair<size_t, bool>> wanted;
  if (!field(request, "outputs")) {
    for (size_t place = 0; place < known.size(); ++place) wanted.emplace_back(place, all_binary);
    return wanted;
  }
  std::vector<std::string> names;
  for (const Input& output : known) names.push_back(output.name);
  size_t number = 0;
  for (const element entry : list_of(request, "outputs")) {
    const std::string owner = "outputs[" + std::to_string(number++) + ']';
    const object fields = fields_of(entry, {"name", "parameters"}, owner);
    const std::string name = text_of(fields, "name", owner);
    const auto place =
        static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
    const bool again = std::any_of(wanted.begin(), wanted.end(),
                                   [&](const auto& other) { return other.first == place; });
    if (place == names.size() || again) {
      refuse(owner, "expected some of " + listed(names) + ", not '" + name + '\'');
    }
    const auto own = parameters_of(fields, owner);
    if (parameter(own, "classification")) {
      refuse(owner, "classification is not built: ask for the tensor");
    }
    wanted.emplace_back(place, flag_of(own, "binary_data", owner, all_binary));
  }
  return wanted;
}

inline size_t json_length(const std::optional<std::string>& header, size_t body_bytes) {
  if (!header) return body_bytes;
  const bool is_number =
      !header->empty() && header->size() < 16 &&
      std::all_of(
          header->begin(), header->end(), [](unsigned char letter) { return isdigit(letter); });
  const size_t length = is_number ? std::stoul(*header) : body_bytes + 1;
  if (length > body_bytes) {
    refuse(kLengthHeader,
           "expected at most the " + std::to_string(body_bytes) + " bytes of the body");
  }
  return length;
}

}  // namespace detail

// -1 is a size that changes from run to run.
inline http::Response model_metadata(const NamedModel& model) {
  std::ostringstream out;
  out << "{\"name\":" << quoted(model.name) << ",\"versions\":[" << quoted(model.version)
      << "],\"platform\":\"torch_dynemb\",\"inputs\":[";
  detail::describe(model.inputs, out);
  out << "],\"outputs\":[";
  detail::describe(model.outputs, out);
  out << "]}";
  return {out.str()};
}

// Runs a model on a request. Throws std::exception for a wrong request; the message names the
// field.
inline http::Response infer(const NamedModel& model, const http::Request& given) {
  const size_t length = detail::json_length(given.header(kLengthHeader), given.body.size());
  const json_tensors::Document document(given.body, length);
  const object request =
      fields_of(document.root(), {"id", "parameters", "inputs", "outputs"}, "the request");
  std::vector<at::Tensor> inputs =
      detail::inputs_of(request, model.inputs, std::string_view(given.body).substr(length));
  const auto wanted = detail::wanted_outputs(request, model.outputs);
  std::ostringstream out;
  out << "{\"model_name\":" << quoted(model.name) << ",\"model_version\":" << quoted(model.version);
  if (field(request, "id"))
    out << ",\"id\":" << quoted(detail::text_of(request, "id", "the request"));
  out << ",\"outputs\":[";
  const std::vector<at::Tensor> outputs = model.run(std::move(inputs));
  std::string binary;
  bool is_first = true, has_binary = false;
  for (const auto& [place, is_binary] : wanted) {
    const at::Tensor tensor = outputs.at(place).contiguous();
    const std::string& name = model.outputs[place].name;
    out << (std::exchange(is_first, false) ? "" : ",") << "{\"name\":" << quoted(name)
        << ",\"datatype\":" << quoted(datatype(tensor.scalar_type())) << ",\"shape\":[";
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      out << (dim == 0 ? "" : ",") << tensor.size(dim);
    }
    out << "],";
    if (is_binary) {
      has_binary = true;
      binary.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
      out << "\"parameters\":{\"binary_data_size\":" << tensor.nbytes() << "}}";
      continue;
    }
    out << "\"data\":[";
    json_tensors::print_numbers(tensor, "outputs." + name, out);
    out << "]}";
  }
  out << "]}";
  const std::string text = out.str();
  if (!has_binary) return {text};
  return {
      text + binary, "application/octet-stream", {{kLengthHeader, std::to_string(text.size())}}};
}

// Answers the paths of a model; nothing: it is another path.
inline std::optional<http::Response> answer(const NamedModel& model, const http::Request& request) {
  const std::string prefix = "/v2/models/";
  if (request.path.rfind(prefix, 0) != 0) return std::nullopt;
  std::vector<std::string> parts;
  std::istringstream path(request.path.substr(prefix.size()));
  for (std::string part; std::getline(path, part, '/');) parts.push_back(part);
  if (parts.empty()) return std::nullopt;
  std::string asked = parts[0];
  bool is_served = parts[0] == model.name;
  size_t next = 1;
  if (parts.size() > 2 && parts[1] == "versions") {
    is_served &= parts[2] == model.version;
    asked += ", version " + parts[2];
    next = 3;
  }
  const std::string call = parts.size() == next + 1 ? parts[next] : "";
  const bool is_known = parts.size() == next ? request.method == "GET"
                                             : (call == "ready" && request.method == "GET") ||
                                                   (call == "infer" && request.method == "POST");
  if (!is_known) return std::nullopt;
  if (!is_served) {
    return http::refusal(404, "this server has no model " + asked + ": it serves " + model.name);
  }
  if (call == "ready") return model.ready();
  return call == "infer" ? infer(model, request) : model_metadata(model);
}

}  // namespace inference_protocol
