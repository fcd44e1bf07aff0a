// Messages of random requests from one side to the other, with and without graphs named, and what cannot be read.
#include "../../tests/check.h"
#include "../messages.h"

#include <deque>

using edgespec::KnownGraphs;
using edgespec::Messages;
using Bytes = std::vector<uint8_t>;

enum : uint8_t { SET_TENSOR = 6, GET_TENSOR = 8, GRAPH_COMPUTE = 10 };

struct Wire {
    std::deque<uint8_t> bytes;
    size_t n_writes = 0;
    bool write(const void *data, size_t size) {
        bytes.insert(bytes.end(), (const uint8_t *)data, (const uint8_t *)data + size);
        n_writes++;
        return true;
    }
    bool read(void *data, size_t size) {
        if (bytes.size() < size) {
            return false;
        }
        std::copy_n(bytes.begin(), size, (uint8_t *)data);
        bytes.erase(bytes.begin(), bytes.begin() + (long)size);
        return true;
    }
};

static Bytes kept; // what a server was last told to keep
static void keep(const uint8_t *bytes, size_t size) { kept.assign(bytes, bytes + size); }

static Messages side(Wire &wire, bool is_client) {
    return Messages(is_client, [&wire](const void *data, size_t size) { return wire.write(data, size); },
                    [&wire](void *data, size_t size) { return wire.read(data, size); }, keep);
}

static void send(Messages &client, uint8_t command, const Bytes &data) {
    const uint64_t size = data.size();
    CHECK(client.send(&command, sizeof command) && client.send(&size, sizeof size));
    CHECK(client.send(data.data(), data.size()) && client.flush());
}

static bool receive(Messages &server, uint8_t &command, Bytes &data) {
    uint64_t size = 0;
    if (!server.read_request(&command, sizeof command) || !server.read_request(&size, sizeof size) || size > 1 << 24) {
        return false;
    }
    data.resize(size);
    return server.read_request(data.data(), size);
}

static Bytes random_bytes(uint64_t *state, size_t size) {
    Bytes bytes(size);
    for (uint8_t &byte : bytes) {
        byte = (uint8_t)random_bits(state);
    }
    return bytes;
}

static size_t test_all_arrives(bool names_graphs) {
    uint64_t state = 7;
    Wire wire;
    Messages client = side(wire, true), server = side(wire, false);
    client.name_graphs(names_graphs);
    server.name_graphs(names_graphs);
    std::vector<Bytes> graphs;
    for (size_t i = 0; i < KnownGraphs::MOST + 6; i++) { // a few more than are kept, and a few large ones are more than is kept
        graphs.push_back(random_bytes(&state, i % 9 == 8 ? (6 << 20) + i : 1 + random_below(&state, 3000)));
    }
    std::deque<std::pair<uint8_t, Bytes>> sent;
    size_t n_bytes = 0;
    for (int i = 0; i < 2000; i++) {
        const uint8_t commands[] = {SET_TENSOR, GET_TENSOR, GRAPH_COMPUTE, GRAPH_COMPUTE};
        const uint8_t command = commands[random_below(&state, 4)];
        const size_t n = 2 + random_below(&state, i % 100 < 90 ? 8 : graphs.size() - 1);
        Bytes data = command == GRAPH_COMPUTE ? graphs[random_below(&state, n)] : random_bytes(&state, n % 7 * 5000);
        if (command == SET_TENSOR && data.size() > 296) {
            data[296] = 0; // is not to be kept
        }
        send(client, command, data);
        sent.emplace_back(command, std::move(data));
        if (command == SET_TENSOR) {
            continue; // it may wait
        }
        n_bytes += wire.bytes.size();
        for (; !sent.empty(); sent.pop_front()) {
            uint8_t got = 0;
            Bytes received;
            CHECK(receive(server, got, received));
            CHECK(got == sent.front().first && received == sent.front().second);
        }
        CHECK(wire.bytes.empty());
    }
    return n_bytes;
}

static void test_one_write_for_a_pass() {
    Wire wire;
    Messages client = side(wire, true), server = side(wire, false);
    client.name_graphs(true);
    for (int i = 0; i < 5; i++) {
        send(client, SET_TENSOR, Bytes(100));
    }
    CHECK(wire.n_writes == 0);
    send(client, GRAPH_COMPUTE, Bytes(1000));
    CHECK(wire.n_writes == 1 && wire.bytes.size() == 5 * (9 + 100) + 9 + 1 + 1000);
    CHECK(server.send(Bytes(8).data(), 8) && server.send(Bytes(50).data(), 50) && server.flush());
    CHECK(wire.n_writes == 2);
}

// A node that keeps the weights is not sent them; another is, and keeps them. What is no weight is not asked for.
static void test_weights_are_asked_for() {
    for (const char *const name : {"blk.0.ffn_up.weight", "RPC0#l_out-3#0"}) {
        for (const uint8_t there : {0, 1}) {
            Wire wire, answers;
            kept.clear();
            Messages client(
                true, [&wire](const void *data, size_t size) { return wire.write(data, size); },
                [&answers](void *data, size_t size) { return answers.read(data, size); }, keep);
            Messages server = side(wire, false);
            const uint64_t size = sizeof there;
            answers.write(&size, sizeof size);
            answers.write(&there, sizeof there);
            Bytes data(296 + 9 + 100000, 7);
            data[296] = 0;
            strcpy((char *)&data[228], name);
            send(client, SET_TENSOR, data);
            const bool is_weight = name[0] == 'b';
            CHECK(answers.bytes.empty() == is_weight);
            uint8_t command = 0;
            Bytes received;
            if (is_weight) {
                CHECK(receive(server, command, received) && command == 7 && received.size() == 296 + 16);
                CHECK(memcmp(received.data(), data.data(), 296) == 0);
            }
            CHECK(receive(server, command, received) != (is_weight && there));
            CHECK((is_weight && there) || (command == SET_TENSOR && received.size() == data.size()));
            CHECK((is_weight && there) || received[296] == 0); // ggml keeps nothing
            CHECK(kept == (is_weight && !there ? Bytes(data.begin() + 296 + 9, data.end()) : Bytes()));
        }
    }
}

// What a server is sent by somebody who does not keep to the rules is refused, not read from elsewhere.
static void test_impossible_places() {
    uint64_t state = 3;
    for (int i = 0; i < SAMPLES(20000); i++) {
        Wire wire;
        Messages server = side(wire, false);
        server.name_graphs(true);
        const uint64_t follows = random_below(&state, 4);
        const uint8_t place = i % 2 ? KnownGraphs::NEW : (uint8_t)random_bits(&state);
        wire.write("\x0a", 1);
        wire.write(&follows, sizeof follows);
        wire.write(&place, sizeof place);
        wire.write("abc", 3);
        uint8_t command = 0;
        Bytes data;
        const bool possible = place == KnownGraphs::NEW && follows > 0;
        CHECK(receive(server, command, data) == possible && (!possible || data.size() == follows - 1));
    }
}

// ggml takes memory of the size that a request names, and ends the process if there is none.
static void test_impossible_sizes() {
    for (const uint8_t command : {SET_TENSOR, GRAPH_COMPUTE}) {
        for (const uint64_t size : {UINT64_MAX, (uint64_t)1 << 40, (uint64_t)1 << 30}) {
            Wire wire;
            Messages server = side(wire, false);
            server.name_graphs(true);
            wire.write(&command, sizeof command);
            wire.write(&size, sizeof size);
            wire.write(&KnownGraphs::NEW, sizeof KnownGraphs::NEW);
            uint8_t got = 0;
            uint64_t said = 0;
            CHECK(server.read_request(&got, sizeof got));
            CHECK(server.read_request(&said, sizeof said) == (size == 1 << 30));
        }
    }
}

int main() {
    const size_t named = test_all_arrives(true), whole = test_all_arrives(false);
    CHECK(named < whole / 2);
    test_one_write_for_a_pass();
    test_weights_are_asked_for();
    test_impossible_places();
    test_impossible_sizes();
    return 0;
}
