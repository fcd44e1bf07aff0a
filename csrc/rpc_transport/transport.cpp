// The connections of ggml's RPC backend (ggml-rpc.cpp, which llama_cpp.cmake has compiled), in place of ggml's transport.cpp.
//
// That one waits for ever, and where a connection breaks its caller ends the process. A client's connection
// here is lost instead: what is asked of it from then on is answered at once with harmless numbers, so that whatever
// llama.cpp has begun ends by itself, and its destructors can free what lay on the node. Whoever called llama.cpp asks
// es_rpc_lost() afterwards whether its results mean anything. A server's connections wait for ever, as ggml's do, but notice a
// client whose machine or network is gone.
#include "answers.h"
#include "kept.h"
#include "lost.h"
#include "messages.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>

using edgespec::CAPS_BYTES;

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t MOST_AT_ONCE = 1 << 30;
constexpr int LOOK_MS = 50; // how often a wait looks whether other patience was set meanwhile

// How long a client waits. Of all connections, because ggml makes them itself and hands nothing down.
struct Patience {
    std::atomic<int> interrupt{-1};
    std::atomic<int> silence_ms{60'000}, interrupted_ms{2'000};
    std::atomic<Clock::rep> interrupted{0}; // when a wait first saw the interruption; 0: none has
};

struct Losses {
    std::mutex mutex;
    std::map<std::string, std::string> reasons; // of endpoints to which a connection was lost
};

Patience &patience() {
    static Patience *const p = new Patience; // never destroyed: ggml's threads may outlive our destructors
    return *p;
}
Losses &losses() {
    static Losses *const l = new Losses;
    return *l;
}

void note(const std::string &endpoint, const std::string &reason) {
    const std::lock_guard<std::mutex> lock(losses().mutex);
    losses().reasons.emplace(endpoint, reason); // the first reason is the cause of later ones
}
void forget(const std::string &endpoint) {
    const std::lock_guard<std::mutex> lock(losses().mutex);
    losses().reasons.erase(endpoint);
}

std::string reason_of(const std::string &endpoint) {
    const std::lock_guard<std::mutex> lock(losses().mutex);
    const auto found = losses().reasons.find(endpoint);
    return found == losses().reasons.end() ? "" : found->second;
}

constexpr char CLOSED[] = "it closed the connection";

std::string in_words(int error) {
    if (error == EPIPE || error == ECONNRESET) {
        return CLOSED;
    }
    char text[128];
    return strerror_r(error, text, sizeof text); // GNU's: returns the text
}

// In the capabilities of ggml's first message, where other servers and clients do not look: this side names graphs (messages.h),
// and a tensor takes on it what ggml's rules say.
constexpr char EDGESPEC[CAPS_BYTES] = "edgespec 2";

} // namespace

// ---- a connection ----

// What ggml-rpc.cpp calls has the names and arguments of ggml's transport.h, with which test_transport.cpp is compiled.
struct socket_t {
    explicit socket_t(int descriptor, std::string where = "") : fd(descriptor), endpoint(std::move(where)) {}
    ~socket_t();
    socket_t(const socket_t &) = delete;
    socket_t &operator=(const socket_t &) = delete;

    static std::shared_ptr<socket_t> create_server(const char *host, int port);
    static std::shared_ptr<socket_t> connect(const char *host, int port);
    std::shared_ptr<socket_t> accept();
    bool send_data(const void *data, size_t size);
    bool recv_data(void *data, size_t size);
    bool flush();
    void get_caps(uint8_t *local_caps);
    void update_caps(const uint8_t *remote_caps);

  private:
    void lose(const std::string &reason);
    bool is_lost() {
        if (!lost.empty()) {
            note(endpoint, lost); // again: somebody may have hoped for a new connection, and got this one
        }
        return !lost.empty();
    }
    bool is_of_no_use() { // a client's is lost, for a reason that is known or for this one
        if (is_client()) {
            lose("its answer makes no sense");
        }
        return is_client();
    }
    bool is_client() const { return !endpoint.empty(); }
    // ggml asks how much a tensor takes for each new number of tokens, several times, and takes what its rules say if that is
    // more than the answer.
    bool is_answered_here() { return is_lost() || (to_edgespec && command == edgespec::GET_ALLOC_SIZE); }
    template <typename Step> bool transfer(short event, char *data, size_t size, Step step);
    bool wait(short event, Clock::time_point since);
    bool write(const void *data, size_t size);
    bool read(void *data, size_t size);
    void follow_request(const void *data, size_t size);

    const int fd;
    const std::string endpoint; // of a client's connection; "": a server's
    bool to_edgespec = false;   // the other side is edgespec's
    std::string lost;           // why; "": it is not
    edgespec::Messages messages{is_client(), [this](const void *data, size_t size) { return write(data, size); },
                                [this](void *data, size_t size) { return read(data, size); }, edgespec::keep};

    // Where in a request, and in its answer, the client is: | command | size | data |, | size | data |.
    int sent_parts = 0, received_parts = 0;
    uint8_t command = 0;
    uint64_t tail = 0; // the last eight bytes of the data: a size where the answer depends on one
};

void socket_t::lose(const std::string &reason) {
    if (lost.empty()) {
        lost = reason;
        note(endpoint, lost);
        if (fd >= 0) {
            shutdown(fd, SHUT_RDWR); // the node stops working for us
        }
    }
}

// Waits until the connection can do `event`; false: it was lost. `since`: when it last did anything.
bool socket_t::wait(short event, Clock::time_point since) {
    using std::chrono::milliseconds;
    for (;;) {
        const int interrupt = patience().interrupt;
        const bool listens = interrupt >= 0 && patience().interrupted == 0;
        pollfd waiting[2] = {{fd, event, 0}, {interrupt, POLLIN, 0}};
        const int n = poll(waiting, listens ? 2 : 1, LOOK_MS);
        if (n < 0 && errno != EINTR) {
            lose(in_words(errno));
            return false;
        }
        const Clock::time_point now = Clock::now();
        if (n > 0 && listens && (waiting[1].revents & POLLIN)) {
            Clock::rep none = 0;
            patience().interrupted.compare_exchange_strong(none, now.time_since_epoch().count());
        }
        const Clock::duration interrupted(patience().interrupted);
        const bool is_interrupted = interrupt >= 0 && interrupted.count();
        if (is_interrupted && now.time_since_epoch() - interrupted > milliseconds(patience().interrupted_ms)) {
            lose("interrupted while it worked");
            return false;
        }
        if (n > 0 && waiting[0].revents) {
            return true; // an error too: the call that follows says which
        }
        if (now - since > milliseconds(patience().silence_ms)) {
            lose("no answer for " + std::to_string(patience().silence_ms / 1000) + " s");
            return false;
        }
    }
}

template <typename Step> bool socket_t::transfer(short event, char *data, size_t size, Step step) {
    Clock::time_point since = Clock::now();
    for (size_t done = 0; done < size;) {
        if (is_client() && !wait(event, since)) {
            return false;
        }
        const ssize_t n = step(data + done, std::min(size - done, MOST_AT_ONCE));
        if (n > 0) {
            done += (size_t)n;
            since = Clock::now();
        } else if (n == 0 || (errno != EINTR && errno != EAGAIN)) {
            if (is_client()) {
                lose(n == 0 ? CLOSED : in_words(errno));
            }
            return false;
        }
    }
    return true;
}

void socket_t::follow_request(const void *data, size_t size) {
    if (sent_parts == 0) {
        command = *(const uint8_t *)data;
        tail = 0;
    } else if (sent_parts == 2 && size >= sizeof tail) {
        memcpy(&tail, (const char *)data + size - sizeof tail, sizeof tail);
    }
    sent_parts = (sent_parts + 1) % 3;
    received_parts = 0;
}

bool socket_t::write(const void *data, size_t size) {
    const auto step = [this](char *at, size_t n) { return send(fd, at, n, MSG_NOSIGNAL); };
    return transfer(POLLOUT, (char *)const_cast<void *>(data), size, step);
}
bool socket_t::read(void *data, size_t size) {
    const auto step = [this](char *at, size_t n) { return recv(fd, at, n, 0); };
    return transfer(POLLIN, (char *)data, size, step);
}

bool socket_t::send_data(const void *data, size_t size) {
    if (is_client()) {
        follow_request(data, size);
    }
    return (is_client() && is_answered_here()) || messages.send(data, size) || is_of_no_use();
}

bool socket_t::recv_data(void *data, size_t size) {
    if (!is_client()) {
        return messages.read_request(data, size);
    }
    const bool received = !is_answered_here() && read(data, size);
    const uint64_t expected = edgespec::answer_size(command, tail);
    if (received_parts++ == 0) {
        uint64_t said = 0;
        memcpy(&said, data, sizeof said);
        if (received && said != expected) {
            lose("its answer has " + std::to_string(said) + " bytes, not " + std::to_string(expected));
        }
        memcpy(data, &expected, sizeof expected);
        return true;
    }
    if (received && !edgespec::is_possible(command, tail, data)) {
        lose("its answer has impossible numbers");
    }
    if (is_answered_here()) {
        edgespec::answer_here(command, data, size);
    }
    return true;
}

socket_t::~socket_t() {
    if (fd >= 0) {
        close(fd);
    }
}
bool socket_t::flush() { return is_lost() || messages.flush() || is_of_no_use(); }
void socket_t::get_caps(uint8_t *local_caps) { memcpy(local_caps, EDGESPEC, CAPS_BYTES); }
void socket_t::update_caps(const uint8_t *remote_caps) {
    to_edgespec = memcmp(remote_caps, EDGESPEC, CAPS_BYTES) == 0;
    messages.name_graphs(to_edgespec);
}

// ---- connecting ----

namespace {

bool set_option(int fd, int level, int option, int value = 1) {
    return setsockopt(fd, level, option, &value, sizeof value) == 0;
}

// Ends a connection whose other side has given no sign of life for 30 s: a client that sleeps or has left the network would
// occupy the server for ever. That it computes nothing for so long is no reason: its system answers.
bool notice_the_dead(int fd) {
    return set_option(fd, SOL_SOCKET, SO_KEEPALIVE) && set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 15) &&
           set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5) && set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3) &&
           set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 30'000); // where bytes for it wait to be acknowledged
}

// A connection to a numeric address within the patience; -1 and why not else.
int connected(const char *host, int port, std::string &reason) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)port);
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1) {
        reason = "not a numeric address";
        return -1;
    }
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && (connect(fd, (const sockaddr *)&address, sizeof address) == 0 || errno == EINPROGRESS)) {
        pollfd waiting = {fd, POLLOUT, 0};
        int error = ETIMEDOUT;
        socklen_t size = sizeof error;
        if (poll(&waiting, 1, patience().silence_ms) > 0) {
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
        }
        if (error == 0 && set_option(fd, IPPROTO_TCP, TCP_NODELAY)) {
            return fd;
        }
        errno = error;
    }
    reason = in_words(errno);
    if (fd >= 0) {
        close(fd);
    }
    return -1;
}

} // namespace

// Never nullptr, over which ggml would end the process: a connection that cannot be made is one that is lost. As is a second
// one to a lost node, which ggml makes when it holds nothing of the first: es_rpc_lost() must not change its mind.
std::shared_ptr<socket_t> socket_t::connect(const char *host, int port) {
    const std::string endpoint = std::string(host) + ":" + std::to_string(port);
    std::string reason = reason_of(endpoint);
    const int fd = reason.empty() ? connected(host, port, reason) : -1;
    auto made = std::make_shared<socket_t>(fd, endpoint);
    if (fd < 0) {
        made->lose(reason);
    }
    return made;
}

std::shared_ptr<socket_t> socket_t::accept() {
    const int client = accept4(fd, nullptr, nullptr, SOCK_CLOEXEC);
    if (client < 0) {
        return nullptr;
    }
    auto made = std::make_shared<socket_t>(client);
    return set_option(client, IPPROTO_TCP, TCP_NODELAY) && notice_the_dead(client) ? made : nullptr;
}

std::shared_ptr<socket_t> socket_t::create_server(const char *host, int port) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)port);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return nullptr;
    }
    auto made = std::make_shared<socket_t>(fd);
    const bool listens = inet_pton(AF_INET, host, &address.sin_addr) == 1 && set_option(fd, SOL_SOCKET, SO_REUSEADDR) &&
                         bind(fd, (const sockaddr *)&address, sizeof address) == 0 && listen(fd, 1) == 0;
    return listens ? made : nullptr;
}

bool rpc_transport_init() { return true; }
void rpc_transport_shutdown() {}

// ---- lost.h ----

extern "C" {

void es_rpc_patience(int interrupt, int silence_ms, int interrupted_ms) {
    patience().silence_ms = silence_ms;
    patience().interrupted_ms = interrupted_ms;
    patience().interrupted = 0;
    patience().interrupt = interrupt;
}

int es_rpc_lost(const char *endpoint, char *reason, size_t size) {
    const std::string found = reason_of(endpoint);
    if (size) {
        const size_t n = std::min(found.size(), size - 1);
        memcpy(reason, found.data(), n);
        reason[n] = '\0';
    }
    return found.empty() ? 0 : 1;
}

void es_rpc_forget(const char *endpoint) { forget(endpoint); }
}
