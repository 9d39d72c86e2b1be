// An HTTP server: one thread for each connection, which stays open.
//
// A server on the internet wants limits and TLS, which a proxy in front of it has.

#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "serving/json.h"

namespace http {

struct Request {
  std::string method, path;                    // without a query
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;

  std::optional<std::string> header(const std::string& name) const {
    const auto found = headers.find(name);
    return found == headers.end() ? std::nullopt : std::optional(found->second);
  }
};

struct Response {
  std::string body;
  std::string content_type = "application/json";
  std::vector<std::pair<std::string, std::string>> headers;
  int status = 200;
};

// Answers a request. Nothing: the path is unknown (status 404). An exception is the answer of
// status 400.
using Handler = std::function<std::optional<Response>(const Request&)>;

// Called after each answer, with the seconds from the head of the request to it.
using Observer = std::function<void(const Request&, int status, double seconds)>;

// The answer to a request that is not taken.
inline Response refusal(int status, const std::string& why) {
  return {"{\"error\":" + dynemb::serving::quoted(why) + "}", "application/json", {}, status};
}

namespace detail {

constexpr size_t kMostHeaderBytes = size_t{64} << 10, kMostBytes = size_t{64} << 20;

inline std::string reason(int status) {
  static const std::map<int, std::string> kReasons = {{200, "OK"},
                                                      {400, "Bad Request"},
                                                      {404, "Not Found"},
                                                      {411, "Length Required"},
                                                      {413, "Content Too Large"},
                                                      {415, "Unsupported Media Type"}};
  return kReasons.at(status);
}

inline std::string message(const Response& response) {
  std::string text = "HTTP/1.1 " + std::to_string(response.status) + ' ' + reason(response.status);
  text += "\r\nContent-Type: " + response.content_type;
  text += "\r\nContent-Length: " + std::to_string(response.body.size());
  for (const auto& [name, value] : response.headers) text += "\r\n" + name + ": " + value;
  return text + "\r\n\r\n" + response.body;
}

inline Response response(const Handler& handler, const Request& request) {
  if (request.headers.count("content-encoding") != 0) {
    return refusal(415, "Content-Encoding: a compressed request is not built");
  }
  try {
    const auto found = handler(request);
    return found ? *found : refusal(404, "unknown path");
  } catch (const std::exception& error) {
    const std::string what = error.what();  // behind the first line is the place in the op
    return refusal(400, what.substr(0, what.find('\n')));
  }
}

inline bool send_all(int connection, const std::string& data) {
  for (size_t sent = 0; sent < data.size();) {
    const ssize_t count = send(connection, &data[sent], data.size() - sent, MSG_NOSIGNAL);
    if (count <= 0) return false;
    sent += static_cast<size_t>(count);
  }
  return true;
}

// A path with the letters that %41 and the like stand for.
inline std::string unquoted(const std::string& path) {
  std::string result;
  for (size_t at = 0; at < path.size(); ++at) {
    const std::string digits = path.substr(at + 1 < path.size() ? at + 1 : path.size(), 2);
    const bool is_quoted =
        path[at] == '%' && digits.size() == 2 &&
        std::all_of(digits.begin(), digits.end(), [](unsigned char of) { return isxdigit(of); });
    result += is_quoted ? static_cast<char>(std::stoi(digits, nullptr, 16)) : path[at];
    at += is_quoted ? 2 : 0;
  }
  return result;
}

// The head of a request: its first line, and its headers.
inline Request head_of(const std::string& text) {
  Request request;
  size_t end = std::min(text.find("\r\n"), text.size());
  const size_t first = std::min(text.find(' '), end);
  const size_t second = std::min(text.find(' ', first + 1), end);
  request.method = text.substr(0, first);
  if (first < second) {
    const std::string target = text.substr(first + 1, second - first - 1);
    request.path = unquoted(target.substr(0, target.find('?')));
  }
  while (end < text.size()) {
    const size_t begin = end + 2;
    end = std::min(text.find("\r\n", begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    std::string name = line.substr(0, colon);
    std::transform(name.begin(), name.end(), name.begin(), ::tolower);
    const size_t value = line.find_first_not_of(" \t", colon + 1);
    const size_t last = line.find_last_not_of(" \t");
    request.headers[name] =
        value == std::string::npos ? std::string() : line.substr(value, last - value + 1);
  }
  return request;
}

// Answers requests of a connection until the client closes it, or sends what is not a request.
inline void answer_all(int connection, const Handler& handler, const Observer& answered) {
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
      if (data.size() > kMostHeaderBytes || !receive()) return;
    }
    const auto began = std::chrono::steady_clock::now();
    Request request = head_of(data.substr(0, head));
    const auto answer = [&](const Response& response) {
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - began;
      answered(request, response.status, taken.count());
      return send_all(connection, message(response));
    };
    if (request.header("transfer-encoding")) {
      answer(refusal(411, "the request has no Content-Length"));
      return;
    }
    const auto field = request.header("content-length");
    const size_t length = field ? std::strtoul(field->c_str(), nullptr, 10) : 0;
    if (length > kMostBytes) {
      answer(refusal(413, "the request has more than " + std::to_string(kMostBytes) + " bytes"));
      return;
    }
    while (data.size() < head + 4 + length) {
      if (!receive()) return;
    }
    request.body = data.substr(head + 4, length);
    if (!answer(response(handler, request))) return;
    data.erase(0, head + 4 + length);
  }
}

}  // namespace detail

// Serves until the process ends. Port 0 is one that the system chooses; `ready` gets it.
inline void serve(const std::string& address, uint16_t port, const Handler& handler,
                  const Observer& answered, const std::function<void(int port)>& ready) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in place{};
  socklen_t size = sizeof place;
  place.sin_family = AF_INET;
  place.sin_port = htons(port);
  if (inet_pton(AF_INET, address.c_str(), &place.sin_addr) != 1) {
    throw std::invalid_argument("ADDRESS should be that of an interface, such as 0.0.0.0");
  }
  if (bind(listener, reinterpret_cast<sockaddr*>(&place), size) != 0 || listen(listener, 64) != 0) {
    throw std::runtime_error(std::string("the port cannot be opened: ") + std::strerror(errno));
  }
  getsockname(listener, reinterpret_cast<sockaddr*>(&place), &size);
  ready(ntohs(place.sin_port));
  for (int connection; (connection = accept(listener, nullptr, nullptr)) >= 0;) {
    setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    std::thread([&handler, &answered, connection] {
      detail::answer_all(connection, handler, answered);
      close(connection);
    }).detach();
  }
}

}  // namespace http
