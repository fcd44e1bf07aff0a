// Connections of this process to itself: how long a client waits, and which clients a server notices to be gone.
#include "../../tests/check.h"
#include "../lost.h"

#include "transport.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

enum : uint8_t { GET_ALIGNMENT = 1, GET_ALLOC_SIZE = 13 };
constexpr int PATIENT_MS = 60'000;

static sockaddr_in loopback(int port) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

static int port_of(int fd) {
    sockaddr_in address = {};
    socklen_t size = sizeof address;
    CHECK(getsockname(fd, (sockaddr *)&address, &size) == 0);
    return ntohs(address.sin_port);
}

// A free port that listens.
static int listening(int *fd) {
    const sockaddr_in address = loopback(0);
    *fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(*fd >= 0 && bind(*fd, (const sockaddr *)&address, sizeof address) == 0 && listen(*fd, 8) == 0);
    return port_of(*fd);
}

static int option(int fd, int level, int name) {
    int value = -1;
    socklen_t size = sizeof value;
    CHECK(getsockopt(fd, level, name, &value, &size) == 0);
    return value;
}

// The descriptor of this process that is connected to a port of this machine.
static int connected_to(int port) {
    for (int fd = 0; fd < 1024; fd++) {
        sockaddr_in peer = {};
        socklen_t size = sizeof peer;
        if (getpeername(fd, (sockaddr *)&peer, &size) == 0 && ntohs(peer.sin_port) == port) {
            return fd;
        }
    }
    CHECK(!"no connection");
    return -1;
}

// The system ends a server's connection within half a minute when its client gives no sign of life.
static void test_dead_clients_are_noticed() {
    int probe = -1;
    const int port = listening(&probe);
    close(probe);
    const socket_ptr server = socket_t::create_server("127.0.0.1", port);
    CHECK(server);
    const int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_in address = loopback(port);
    CHECK(connect(client, (const sockaddr *)&address, sizeof address) == 0);
    const socket_ptr accepted = server->accept();
    CHECK(accepted);
    const int fd = connected_to(port_of(client));
    CHECK(option(fd, SOL_SOCKET, SO_KEEPALIVE) == 1);
    const int idle = option(fd, IPPROTO_TCP, TCP_KEEPIDLE), interval = option(fd, IPPROTO_TCP, TCP_KEEPINTVL);
    CHECK(idle + interval * option(fd, IPPROTO_TCP, TCP_KEEPCNT) <= 30);
    CHECK(option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT) == 30'000);
    close(client);
}

// What a client asks for a number with, and gets it; ggml ends where this says false.
static uint64_t ask(const socket_ptr &connection, uint8_t command = GET_ALIGNMENT) {
    const uint64_t size = 4;
    const uint32_t device = 0;
    CHECK(connection->send_data(&command, sizeof command) && connection->send_data(&size, sizeof size));
    CHECK(connection->send_data(&device, sizeof device) && connection->flush());
    uint64_t answer_size = 0, answer = 0;
    CHECK(connection->recv_data(&answer_size, sizeof answer_size) && answer_size == sizeof answer);
    CHECK(connection->recv_data(&answer, sizeof answer));
    return answer;
}

// After an interruption all waits together have `interrupted_ms`, not each of them; what follows has patience again.
static void test_an_interruption_is_one_of_all_waits() {
    int listener = -1, interrupt[2];
    const int port = listening(&listener);
    CHECK(pipe(interrupt) == 0 && write(interrupt[1], "x", 1) == 1);
    std::thread node([listener] {
        for (int i = 0; i < 2; i++) {
            const int fd = accept(listener, nullptr, nullptr);
            CHECK(fd >= 0);
            char request[13];
            while (recv(fd, request, sizeof request, MSG_WAITALL) == sizeof request) {
                std::this_thread::sleep_for(std::chrono::milliseconds(i ? 1 : 600));
                const uint64_t answer[2] = {8, 64};
                send(fd, answer, sizeof answer, MSG_NOSIGNAL);
            }
            close(fd);
        }
    });
    const std::string endpoint = "127.0.0.1:" + std::to_string(port);
    char reason[64];
    {
        const socket_ptr connection = socket_t::connect("127.0.0.1", port);
        es_rpc_patience(interrupt[0], PATIENT_MS, 1000);
        for (int i = 0; i < 3; i++) {
            ask(connection);
        }
        CHECK(es_rpc_lost(endpoint.c_str(), reason, sizeof reason) && !strcmp(reason, "interrupted while it worked"));
        CHECK(ask(connection) == 128);
    }
    es_rpc_forget(endpoint.c_str());
    es_rpc_patience(interrupt[0], PATIENT_MS, 20'000); // the call after: all of its time is before it
    {
        const socket_ptr connection = socket_t::connect("127.0.0.1", port);
        CHECK(ask(connection) == 64 && !es_rpc_lost(endpoint.c_str(), reason, sizeof reason));
        es_rpc_patience(-1, PATIENT_MS, 0);
        CHECK(ask(connection) == 64 && !es_rpc_lost(endpoint.c_str(), reason, sizeof reason));
    }
    node.join();
    close(listener);
    close(interrupt[0]);
    close(interrupt[1]);
}

// A size with which ggml's sums would overflow is a lie.
static void test_impossible_memory() {
    int listener = -1;
    const int port = listening(&listener);
    const std::string endpoint = "127.0.0.1:" + std::to_string(port);
    std::thread node([listener] {
        const int fd = accept(listener, nullptr, nullptr);
        CHECK(fd >= 0);
        char request[13];
        for (const uint64_t size : {(uint64_t)1 << 46, ((uint64_t)1 << 46) + 1}) {
            CHECK(recv(fd, request, sizeof request, MSG_WAITALL) == sizeof request);
            const uint64_t answer[2] = {8, size};
            CHECK(send(fd, answer, sizeof answer, MSG_NOSIGNAL) == sizeof answer);
        }
        close(fd);
    });
    const socket_ptr connection = socket_t::connect("127.0.0.1", port);
    CHECK(ask(connection, GET_ALLOC_SIZE) == (uint64_t)1 << 46);
    CHECK(!es_rpc_lost(endpoint.c_str(), nullptr, 0));
    CHECK(ask(connection, GET_ALLOC_SIZE) == 0);
    CHECK(es_rpc_lost(endpoint.c_str(), nullptr, 0));
    node.join();
    close(listener);
}

// A node of edgespec's is not asked what a tensor takes.
static void test_sizes_are_not_asked_for() {
    int listener = -1;
    const int port = listening(&listener);
    std::thread node([listener] {
        const int fd = accept(listener, nullptr, nullptr);
        CHECK(fd >= 0);
        char request[13];
        const uint64_t answer[2] = {8, 64};
        while (recv(fd, request, sizeof request, MSG_WAITALL) == sizeof request) {
            CHECK(request[0] == GET_ALIGNMENT && send(fd, answer, sizeof answer, MSG_NOSIGNAL) == sizeof answer);
        }
        close(fd);
    });
    {
        const socket_ptr connection = socket_t::connect("127.0.0.1", port);
        uint8_t caps[RPC_CONN_CAPS_SIZE];
        connection->get_caps(caps);
        connection->update_caps(caps);
        CHECK(ask(connection, GET_ALLOC_SIZE) == 0 && ask(connection) == 64 && ask(connection, GET_ALLOC_SIZE) == 0);
    }
    node.join();
    close(listener);
}

// One reason, wherever the reset arrives: in connect(), before the first request or in it.
static void test_a_reset_is_a_closed_connection() {
    constexpr int TIMES = 200;
    int listener = -1;
    const int port = listening(&listener);
    std::thread node([listener] {
        const linger reset = {1, 0};
        for (int i = 0; i < TIMES; i++) {
            const int fd = accept(listener, nullptr, nullptr);
            CHECK(fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset) == 0);
            close(fd);
        }
    });
    const std::string endpoint = "127.0.0.1:" + std::to_string(port);
    for (int i = 0; i < TIMES; i++) {
        ask(socket_t::connect("127.0.0.1", port));
        char reason[64];
        CHECK(es_rpc_lost(endpoint.c_str(), reason, sizeof reason) && !strcmp(reason, "it closed the connection"));
        es_rpc_forget(endpoint.c_str());
    }
    node.join();
    close(listener);
}

int main() {
    test_dead_clients_are_noticed();
    test_an_interruption_is_one_of_all_waits();
    test_impossible_memory();
    test_sizes_are_not_asked_for();
    test_a_reset_is_a_closed_connection();
    return 0;
}
