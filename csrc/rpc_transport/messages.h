// How ggml's messages (ggml-rpc.cpp) go over a connection, so that little does.
//
//     a request    | command, 1 byte | size, 8 bytes | data |        an answer    | size | data |
//
// ggml writes each part by itself. Here a message is one write, and requests that set a tensor wait for the one that needs it:
// of a pass that is one write to each node, where it was twenty, each a packet of its own, and through ssh a message of its own.
// A graph that the other side has had before is named (known_graphs.h), once both sides have said that they do so:
//
//     a graph      | GRAPH_COMPUTE | size | place | graph, where it is new |
//
// Weights are asked for by their hash before they are sent, as ggml does for those of more than 10 MB alone: of a 1.5B model
// these are a sixth. This is ggml's own request, SET_TENSOR_HASH, which every server answers. What a client wants to be kept goes
// to a function of the server's own: ggml does not look whether a file could be written (kept.cpp).
#ifndef EDGESPEC_MESSAGES_H
#define EDGESPEC_MESSAGES_H

#include "known_graphs.h"

#include <functional>

namespace edgespec {

class Messages {
  public:
    using Write = std::function<bool(const void *, size_t)>; // all of it; false: the connection is of no use any more
    using Read = std::function<bool(void *, size_t)>;
    using Keep = std::function<void(const uint8_t *, size_t)>; // a server's: the weights that a client wants to be kept

    Messages(bool is_client, Write write, Read read, Keep keep)
        : is_client_(is_client), write_(std::move(write)), read_(std::move(read)), keep_(std::move(keep)) {}

    void name_graphs(bool both_sides_do) { names_graphs_ = both_sides_do; }

    // The parts of a message one after the other, then its end. False: the connection is of no use any more.
    bool send(const void *part, size_t size);
    bool flush();
    // A server's: the parts of a request as ggml sent them. False: as before, or no such message is possible.
    bool read_request(void *part, size_t size);

  private:
    bool add(const void *bytes, size_t size);
    bool write_held();
    bool send_whole(const void *data, size_t size);
    bool send_graph(const void *graph, size_t size);
    bool send_tensor(const void *data, size_t size);
    bool is_there(const uint8_t *data, size_t size, bool &there);
    void keep_weights(uint8_t *data, size_t size);
    bool read_graph_size(void *part);
    bool read_graph(void *graph, size_t size);
    bool is_graph() const { return names_graphs_ && command_ == GRAPH_COMPUTE; }

    enum : uint8_t { SET_TENSOR = 6, SET_TENSOR_HASH = 7, GRAPH_COMPUTE = 10 };

    const bool is_client_;
    const Write write_;
    const Read read_;
    const Keep keep_;
    bool names_graphs_ = false;
    KnownGraphs graphs_;
    std::vector<uint8_t> held_; // parts that are written with what follows
    uint8_t command_ = 0;       // of the request under way
    int n_parts_ = 0;           // of it, so far
    uint8_t place_ = 0;         // of the graph that is about to be read
};

} // namespace edgespec

#endif
