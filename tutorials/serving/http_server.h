// An HTTP server: one thread for each connection, which stays open. Boost.Beast parses requests.
// After SIGTERM or SIGINT it answers what is under way, and the process ends.
//
// A server on the internet wants TLS, which a proxy in front of it has.

#pragma once

#if !__has_include(<boost/beast/http/parser.hpp>) || !__has_include(<simdjson.h>)
#error \
    "Boost.Beast or simdjson is missing. Debian, Ubuntu: apt-get install libboost-dev libsimdjson-dev"
#endif

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <simdjson.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/status.hpp>
#include <boost/beast/http/string_body.hpp>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "serving/json.h"

namespace http {

struct Request {
  std::string method, path;  // without a query
  boost::beast::http::fields headers;
  std::string body;  // with room for the padding of simdjson

  std::optional<std::string> header(const char* name) const {
    const auto found = headers.find(name);
    return found == headers.end() ? std::nullopt : std::optional<std::string>(found->value());
  }
};

struct Response {
  std::string body;
  std::string content_type = "application/json";
  std::vector<std::pair<std::string, std::string>> headers;
  int status = 200;
};

// The most that clients may take of a server.
struct Limits {
  size_t request_bytes = size_t{16} << 20;  // of a body: 413
  size_t pending_bytes = size_t{64} << 20;  // of all bodies that are read or answered: 503
  size_t connections = 1000;                // open at once: 503
  size_t seconds = 60;                      // to send a request, or to take its answer
  size_t drain_seconds = 20;                // after SIGTERM, to answer requests under way
};

// Answers a request. Nothing: the path is unknown (status 404). An exception is the answer of
// status 400.
using Handler = std::function<std::optional<Response>(const Request&)>;

// Whether the process has got SIGTERM: further POSTs get 503.
using Draining = std::atomic<bool>;

// Called after each answer, with the seconds from the head of the request to it.
using Observer = std::function<void(const Request&, int status, double seconds)>;

// The answer to a request that is not taken.
inline Response refusal(int status, const std::string& why) {
  Response response{"{\"error\":" + dynemb::serving::quoted(why) + "}", "application/json"};
  response.status = status;
  if (status == 503) response.headers.emplace_back("Retry-After", "1");
  return response;
}

constexpr char kDrains[] = "the server is being stopped: ask another one";

namespace detail {

namespace beast = boost::beast::http;
using Clock = std::chrono::steady_clock;
using Parser = beast::request_parser<beast::string_body>;

constexpr size_t kMostHeaderBytes = size_t{64} << 10;
// within which a client should have read the refusal of a request that it still sends
constexpr std::chrono::seconds kDraining{2};

inline std::string message(const Response& response, bool keeps_open, bool has_body = true) {
  const auto reason = beast::obsolete_reason(static_cast<beast::status>(response.status));
  std::string text = "HTTP/1.1 " + std::to_string(response.status) + ' ' + std::string(reason);
  text += "\r\nContent-Type: " + response.content_type;
  text += "\r\nContent-Length: " + std::to_string(response.body.size());
  text += keeps_open ? "\r\nConnection: keep-alive" : "\r\nConnection: close";
  for (const auto& [name, value] : response.headers) text += "\r\n" + name + ": " + value;
  return text + "\r\n\r\n" + (has_body ? response.body : "");
}

inline Response response(const Handler& handler, const Request& request) {
  try {
    const auto found = handler(request);
    return found ? *found : refusal(404, "unknown path");
  } catch (const std::exception& error) {
    const std::string what = error.what();  // behind the first line is the place in the op
    return refusal(400, what.substr(0, what.find('\n')));
  }
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

// A number of things that are taken and given back, up to a limit.
class Budget {
 public:
  explicit Budget(size_t most) : most_(most) {}
  bool take(size_t count) {
    if (taken_.fetch_add(count) + count <= most_) return true;
    give_back(count);
    return false;
  }
  void give_back(size_t count) { taken_ -= count; }
  size_t taken() const { return taken_; }

 private:
  const size_t most_;
  std::atomic<size_t> taken_{0};
};

// What was taken of a budget, until it goes.
struct Taken {
  Budget& budget;
  const size_t count;
  ~Taken() { budget.give_back(count); }
};

struct Server {
  const Handler& handler;
  const Observer& answered;
  const Limits& limits;
  Draining& draining;
  Budget pending{limits.pending_bytes}, connections{limits.connections};
  Budget under_way{SIZE_MAX};  // POSTs that are read or answered
};

// Answers requests of a connection until the client closes it, is late, or sends what is not a
// request.
class Connection {
 public:
  Connection(int socket, Server& server) : socket_(socket), server_(server) {
    const timeval timeout{static_cast<time_t>(server.limits.seconds), 0};
    setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection() {
    close(socket_);
    server_.connections.give_back(1);
  }

  void answer_all() {
    while (answer_one()) {
    }
  }

 private:
  bool is_late(Clock::time_point began) const {
    return Clock::now() - began > std::chrono::seconds(server_.limits.seconds);
  }

  bool receive() {
    char part[1 << 16];
    ssize_t count;
    while ((count = recv(socket_, part, sizeof part, 0)) < 0 && errno == EINTR) {
    }
    if (count > 0) data_.append(part, static_cast<size_t>(count));
    return count > 0;
  }

  bool send_all(const std::string& data) {
    const auto began = Clock::now();
    for (size_t sent = 0; sent < data.size();) {
      const ssize_t count = send(socket_, &data[sent], data.size() - sent, MSG_NOSIGNAL);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0 || is_late(began)) return false;
      sent += static_cast<size_t>(count);
    }
    return true;
  }

  // Reads until `is_done`, or an error of the parser; false: the client has gone or is late.
  template <typename Done>
  bool read(Parser& parser, const Done& is_done, boost::system::error_code& error) {
    const auto began = Clock::now();
    size_t header_bytes = 0;  // header_limit is one of each call
    while (!is_done()) {
      if (data_.empty() || error == beast::error::need_more) {
        if (!receive() || is_late(began)) return false;
      }
      const size_t used = parser.put(boost::asio::buffer(data_), error);
      data_.erase(0, used);
      if (!parser.is_header_done() && (header_bytes += used) > kMostHeaderBytes) {
        error = beast::error::header_limit;
      }
      if (error && error != beast::error::need_more) break;
    }
    return true;
  }

  // Why a request is refused by its head.
  std::optional<Response> refused(const Parser& parser, boost::system::error_code error,
                                  const Request& request) const {
    if (error == beast::error::body_limit) {
      return refusal(413, "the request has more than " +
                              std::to_string(server_.limits.request_bytes) + " bytes");
    }
    if (error == beast::error::header_limit) {
      return refusal(431, "the head of the request has more than " +
                              std::to_string(kMostHeaderBytes) + " bytes");
    }
    if (error && error != beast::error::need_more) {
      return refusal(400, "HTTP: " + error.message());
    }
    if (parser.get().count(beast::field::transfer_encoding) != 0) {
      return refusal(411, "the request has no Content-Length");
    }
    if (parser.get().count(beast::field::content_encoding) != 0) {
      return refusal(415, "Content-Encoding: a compressed request is not built");
    }
    if (!simdjson::validate_utf8(request.path)) return refusal(400, "the path is not UTF-8");
    return std::nullopt;
  }

  bool answer_one() {
    Parser parser;
    parser.header_limit(kMostHeaderBytes);
    parser.body_limit(server_.limits.request_bytes);
    boost::system::error_code error;
    if (!read(parser, [&] { return parser.is_header_done(); }, error)) return false;
    const auto began = Clock::now();
    auto& parsed = parser.get();
    Request request;
    request.method = std::string(parsed.method_string());
    const std::string target(parsed.target());
    request.path = unquoted(target.substr(0, target.find('?')));
    const auto answer = [&](const Response& response, bool keeps_open) {
      const std::chrono::duration<double> taken = Clock::now() - began;
      server_.answered(request, response.status, taken.count());
      return send_all(message(response, keeps_open, request.method != "HEAD")) && keeps_open;
    };
    if (const auto response = refused(parser, error, request)) {
      answer(*response, false);
      return drain();
    }
    const size_t is_post = request.method == "POST";
    server_.under_way.take(is_post);
    const Taken under_way{server_.under_way, is_post};
    if (is_post && server_.draining) {
      answer(refusal(503, kDrains), false);
      return drain();
    }
    const size_t length = parser.content_length().value_or(0);
    if (!server_.pending.take(length)) {
      answer(refusal(503, "the server has too many bytes of requests to answer: ask again later"),
             false);
      return drain();
    }
    const Taken pending{server_.pending, length};
    parsed.body().reserve(length + simdjson::SIMDJSON_PADDING);
    if (boost::beast::iequals(parsed[beast::field::expect], "100-continue") &&
        !send_all("HTTP/1.1 100 Continue\r\n\r\n")) {
      return false;
    }
    if (!read(parser, [&] { return parser.is_done(); }, error)) return false;
    const bool keeps_open = parsed.keep_alive();
    request.body = std::move(parsed.body());
    request.headers = static_cast<beast::fields&&>(parsed);
    return answer(response(server_.handler, request), keeps_open);
  }

  // Waits until the client has read the answer to what it still sends: data that arrive at a
  // closed socket would take the answer from it.
  bool drain() {
    const auto began = Clock::now();
    const timeval timeout{kDraining.count(), 0};
    setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    shutdown(socket_, SHUT_WR);
    while (Clock::now() - began < kDraining && receive()) data_.clear();
    return false;
  }

  const int socket_;
  Server& server_;
  std::string data_;  // received and not parsed
};

// Answers 503 without a thread, and without waiting for the client.
inline void turn_away(int socket, const std::string& why) {
  const std::string text = message(refusal(503, why), /*keeps_open=*/false);
  send(socket, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  shutdown(socket, SHUT_WR);
  char part[1 << 12];
  while (recv(socket, part, sizeof part, MSG_DONTWAIT) > 0) {
  }
  close(socket);
}

// The signals that end the process; threads that are started from here on leave them to one thread.
inline sigset_t block_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return signals;
}

// Waits for one of the signals, then for the requests under way, and ends the process; status 1:
// some have had no answer by then.
[[noreturn]] inline void end_on_signal(const sigset_t& signals, Server& server) {
  int signal = 0;
  sigwait(&signals, &signal);
  server.draining = true;
  const auto end = Clock::now() + std::chrono::seconds(server.limits.drain_seconds);
  while (server.under_way.taken() > 0 && Clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::_Exit(server.under_way.taken() > 0);  // other threads use what an exit would destroy
}

inline void accept_all(int listener, Server& server) {
  for (;;) {
    const int socket = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) {  // a client that has gone, or no descriptor or memory until others go
      if (errno == EBADF || errno == EINVAL || errno == ENOTSOCK) {
        throw std::system_error(errno, std::generic_category(), "accept");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(errno == EINTR ? 0 : 10));
      continue;
    }
    if (!server.connections.take(1)) {
      turn_away(socket, "the server has too many connections: ask again later");
      continue;
    }
    try {
      std::thread([socket, &server] {
        try {
          Connection(socket, server).answer_all();
        } catch (const std::exception& error) {  // no memory: the connection is closed
          std::cerr << error.what() << std::endl;
        }
      }).detach();
    } catch (const std::system_error&) {
      server.connections.give_back(1);
      turn_away(socket, "the server has no thread left: ask again later");
    }
  }
}

}  // namespace detail

// Serves until the process ends. Port 0 is one that the system chooses; `opened` gets it, and
// returns before the first request is read.
inline void serve(const std::string& address, uint16_t port, const Handler& handler,
                  const Observer& answered, const Limits& limits, Draining& draining,
                  const std::function<void(int port)>& opened) {
  const sigset_t signals = detail::block_signals();
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  setsockopt(listener, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);  // connections inherit it
  sockaddr_in place{};
  socklen_t size = sizeof place;
  place.sin_family = AF_INET;
  place.sin_port = htons(port);
  if (inet_pton(AF_INET, address.c_str(), &place.sin_addr) != 1) {
    throw std::invalid_argument("ADDRESS should be that of an interface, such as 0.0.0.0");
  }
  if (bind(listener, reinterpret_cast<sockaddr*>(&place), size) != 0 ||
      listen(listener, 1024) != 0) {
    throw std::runtime_error(std::string("the port cannot be opened: ") + std::strerror(errno));
  }
  getsockname(listener, reinterpret_cast<sockaddr*>(&place), &size);
  detail::Server server{handler, answered, limits, draining};
  std::thread([&] { detail::end_on_signal(signals, server); }).detach();
  opened(ntohs(place.sin_port));
  detail::accept_all(listener, server);
}

}  // namespace http
