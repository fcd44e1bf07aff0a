// What a node answers to a client of ggml's RPC backend (ggml-rpc.cpp).
#ifndef EDGESPEC_ANSWERS_H
#define EDGESPEC_ANSWERS_H

#include <stddef.h>
#include <stdint.h>

namespace edgespec {

constexpr size_t CAPS_BYTES = 24; // capabilities, in a hello and its answer

// The commands of ggml-rpc.cpp that are answered.
enum Command : uint8_t {
    ALLOC_BUFFER = 0,
    GET_ALIGNMENT = 1,
    GET_MAX_SIZE = 2,
    BUFFER_GET_BASE = 3,
    SET_TENSOR_HASH = 7,
    GET_TENSOR = 8,
    COPY_TENSOR = 9,
    GET_DEVICE_MEMORY = 11,
    GET_ALLOC_SIZE = 13,
    HELLO = 14,
    DEVICE_COUNT = 15,
};

// Bytes of the answer to a request whose last eight bytes are `tail`.
uint64_t answer_size(uint8_t command, uint64_t tail);

// What is answered here, without the node. Zeros but for numbers with which ggml would end the process.
void answer_here(uint8_t command, void *answer, size_t size);

// Whether ggml can work with an answer: it ends the process over some that it cannot.
bool is_possible(uint8_t command, uint64_t tail, const void *answer);

} // namespace edgespec

#endif
