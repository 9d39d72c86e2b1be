// An HTTP server of JSON requests: one thread for each connection, which stays open.
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
#include <cstring>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include "serving/json.h"

namespace http {

// Answers a request, named by its method and path ("POST /run"), with JSON. Nothing: the
// path is unknown (status 404). An exception is the answer of status 400.
using Handler =
    std::function<std::optional<std::string>(const std::string& name, const std::string& body)>;

namespace detail {

constexpr size_t kMostHeaderBytes = size_t{64} << 10, kMostBytes = size_t{64} << 20;

inline std::string message(const std::string& status, const std::string& content) {
  return "HTTP/1.1 " + status +
         "\r\nContent-Type: application/json\r\nContent-Length: " + std::to_string(content.size()) +
         "\r\n\r\n" + content;
}

inline std::string refusal(const std::string& status, const std::string& why) {
  return message(status, "{\"error\":" + dynemb::serving::quoted(why) + "}");
}

inline std::string response(const Handler& handler, const std::string& name,
                            const std::string& body) {
  try {
    const auto found = handler(name, body);
    return found ? message("200 OK", *found) : refusal("404 Not Found", "unknown path");
  } catch (const std::exception& error) {
    const std::string what = error.what();  // behind the first line is the place in the op
    return refusal("400 Bad Request", what.substr(0, what.find('\n')));
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

// Answers requests of a connection until the client closes it, or sends what is not a request.
inline void answer_all(int connection, const Handler& handler) {
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
    const std::string name = data.substr(0, data.find(' ', data.find(' ') + 1));
    std::string headers = data.substr(0, head);
    std::transform(headers.begin(), headers.end(), headers.begin(), ::tolower);
    if (headers.find("\r\ntransfer-encoding:") != std::string::npos) {
      send_all(connection, refusal("411 Length Required", "the request has no Content-Length"));
      return;
    }
    const size_t field = headers.find("\r\ncontent-length:");
    const size_t length =
        field == std::string::npos ? 0 : std::strtoul(&headers[field + 17], nullptr, 10);
    if (length > kMostBytes) {
      send_all(connection,
               refusal("413 Content Too Large",
                       "the request has more than " + std::to_string(kMostBytes) + " bytes"));
      return;
    }
    while (data.size() < head + 4 + length) {
      if (!receive()) return;
    }
    if (!send_all(connection, response(handler, name, data.substr(head + 4, length)))) return;
    data.erase(0, head + 4 + length);
  }
}

}  // namespace detail

// Serves until the process ends. Port 0 is one that the system chooses; `ready` gets it.
inline void serve(const std::string& address, uint16_t port, const Handler& handler,
                  const std::function<void(int port)>& ready) {
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
    std::thread([&handler, connection] {
      detail::answer_all(connection, handler);
      close(connection);
    }).detach();
  }
}

}  // namespace http
