// An HTTP server of one model, in C++ with libtorch only.
//
//   server PACKAGE OP_LIBRARY [PORT [ADDRESS]]     port 0: one that the system chooses
//
//   POST /run   {"inputs": {"ids": [[1, 2], [3, 4]], ...}}  ->  {"version": ..., "outputs": [...]}
//   GET /       {"version": ..., "inputs": [names]}
//
// Every connection has a thread. A server on the internet wants limits and TLS, which a proxy in
// front of it has.

#include <ATen/Parallel.h>
#include <ATen/ops/tensor.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <iostream>
#include <thread>

#include "serving/model.h"

using dynemb::serving::Input;
using dynemb::serving::Json;
using dynemb::serving::Model;

// Appends the numbers of nested lists, and the shape of what lies `depth` lists deep.
void flatten(const Json& value, size_t depth, std::vector<double>& numbers,
             std::vector<int64_t>& shape) {
  if (!value.is_array()) return numbers.push_back(value.number());
  const auto length = static_cast<int64_t>(value.array().size());
  if (shape.size() == depth) shape.push_back(length);
  if (shape[depth] != length) throw std::invalid_argument("lists of a tensor differ in length");
  for (const Json& part : value.array()) flatten(part, depth + 1, numbers, shape);
}

// Ids are whole numbers of 64 bits, which doubles are not.
void flatten_ids(const Json& value, std::vector<int64_t>& ids) {
  if (!value.is_array()) return ids.push_back(value.integer());
  for (const Json& part : value.array()) flatten_ids(part, ids);
}

at::Tensor tensor_of(const Json& value, const Input& input) {
  std::vector<double> numbers;
  std::vector<int64_t> shape, ids;
  flatten(value, 0, numbers, shape);
  for (size_t dim = shape.size(); dim < input.sizes.size(); ++dim) {  // of an empty list
    shape.push_back(input.sizes[dim] ? input.sizes[dim]->plus : 0);
  }
  if (!c10::isIntegralType(input.dtype, false))
    return at::tensor(numbers).reshape(shape).to(input.dtype);
  flatten_ids(value, ids);
  return at::tensor(ids, at::kLong).reshape(shape).to(input.dtype);
}

void print(const at::Tensor& tensor, std::ostream& out) {
  if (tensor.dim() == 0) {
    out << tensor.item<double>();
    return;
  }
  out << '[';
  for (int64_t row = 0; row < tensor.size(0); ++row) {
    if (row > 0) out << ',';
    print(tensor[row], out);
  }
  out << ']';
}

std::string run(Model& model, const std::string& body) {
  const Json request = Json::parse(body);
  std::vector<at::Tensor> inputs;
  for (const Input& input : model.inputs()) {
    inputs.push_back(tensor_of(request.at("inputs").at(input.name), input));
  }
  std::ostringstream out;
  out.precision(9);  // every float32 is another text
  out << "{\"version\":" << dynemb::serving::quoted(model.version()) << ",\"outputs\":[";
  bool first = true;
  for (const at::Tensor& output : model.run(std::move(inputs))) {
    if (!std::exchange(first, false)) out << ',';
    print(output, out);
  }
  return out.str() + "]}";
}

std::string describe(const Model& model) {
  std::string names;
  for (const Input& input : model.inputs()) {
    names += (names.empty() ? "" : ",") + dynemb::serving::quoted(input.name);
  }
  return "{\"version\":" + dynemb::serving::quoted(model.version()) + ",\"inputs\":[" + names +
         "]}";
}

// Answers requests of a connection until the client closes it.
void serve(Model& model, int connection) {
  constexpr size_t kMostBytes = size_t{64} << 20;
  std::string data;
  char part[1 << 16];
  const auto receive = [&] {
    const ssize_t count = recv(connection, part, sizeof part, 0);
    if (count > 0) data.append(part, static_cast<size_t>(count));
    return count > 0;
  };
  for (;;) {
    size_t head;
    while ((head = data.find("\r\n\r\n")) == std::string::npos) {
      if (data.size() > sizeof part || !receive()) return;
    }
    std::string headers = data.substr(0, head);
    std::transform(headers.begin(), headers.end(), headers.begin(), ::tolower);
    const size_t field = headers.find("\r\ncontent-length:");
    const size_t length =
        field == std::string::npos ? 0 : std::strtoul(&headers[field + 17], nullptr, 10);
    if (length > kMostBytes) return;
    while (data.size() < head + 4 + length) {
      if (!receive()) return;
    }
    std::string status = "200 OK", answer;
    try {
      answer = headers.rfind("post", 0) == 0 ? run(model, data.substr(head + 4, length))
                                             : describe(model);
    } catch (const std::exception& error) {
      status = "400 Bad Request";
      const std::string what = error.what();  // behind the first line, an op tells where it was
      answer = "{\"error\":" + dynemb::serving::quoted(what.substr(0, what.find('\n'))) + "}";
    }
    data.erase(0, head + 4 + length);
    answer = "HTTP/1.1 " + status + "\r\nContent-Type: application/json\r\nContent-Length: " +
             std::to_string(answer.size()) + "\r\n\r\n" + answer;
    for (size_t sent = 0; sent < answer.size();) {
      const ssize_t count = send(connection, &answer[sent], answer.size() - sent, MSG_NOSIGNAL);
      if (count <= 0) return;
      sent += static_cast<size_t>(count);
    }
  }
}

int main(int count, char** arguments) try {
  if (count < 3) throw std::invalid_argument("usage: server PACKAGE OP_LIBRARY [PORT [ADDRESS]]");
  at::set_num_threads(1);  // requests run side by side instead
  dynemb::serving::load_ops(arguments[2]);
  Model model(arguments[1], std::max(1u, std::thread::hardware_concurrency()));
  const int listener = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in address{};
  socklen_t size = sizeof address;
  address.sin_family = AF_INET;
  if (inet_pton(AF_INET, count > 4 ? arguments[4] : "127.0.0.1", &address.sin_addr) != 1) {
    throw std::invalid_argument("ADDRESS should be that of an interface, such as 0.0.0.0");
  }
  address.sin_port = htons(static_cast<uint16_t>(count > 3 ? std::stoi(arguments[3]) : 8000));
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener, 64) != 0) {
    throw std::runtime_error(std::string("the port cannot be opened: ") + std::strerror(errno));
  }
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  std::cout << "serving version " << model.version() << " on port " << ntohs(address.sin_port)
            << std::endl;
  for (int connection; (connection = accept(listener, nullptr, nullptr)) >= 0;) {
    setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    std::thread([&model, connection] {
      serve(model, connection);
      close(connection);
    }).detach();
  }
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
