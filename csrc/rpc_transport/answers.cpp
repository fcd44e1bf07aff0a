// See answers.h.
#include "answers.h"

#include <string.h>

#include <algorithm>

namespace edgespec {

namespace {

constexpr uint64_t MOST_ALIGNMENT = 1 << 20;
constexpr uint64_t MOST_MEMORY = (uint64_t)1 << 46; // bytes of one tensor: sums of these do not overflow
constexpr uint8_t MAJOR_VERSION = 7, MINOR_VERSION = 0; // of the protocol

} // namespace

uint64_t answer_size(uint8_t command, uint64_t tail) {
    switch (command) {
    case ALLOC_BUFFER:
    case GET_DEVICE_MEMORY:
        return 16;
    case GET_ALIGNMENT:
    case GET_MAX_SIZE:
    case BUFFER_GET_BASE:
    case GET_ALLOC_SIZE:
        return 8;
    case HELLO:
        return 4 + CAPS_BYTES;
    case DEVICE_COUNT:
        return 4;
    case GET_TENSOR:
        return tail;
    default:
        return 1;
    }
}

void answer_here(uint8_t command, void *answer, size_t size) {
    memset(answer, 0, size);
    const uint64_t number = command == GET_ALIGNMENT     ? 128
                            : command == GET_MAX_SIZE    ? SIZE_MAX
                            : command == BUFFER_GET_BASE ? MOST_ALIGNMENT
                            : command == SET_TENSOR_HASH ? 1 // it has these bytes: they are not sent
                                                         : 0;
    memcpy(answer, &number, std::min(size, sizeof number));
    if (command == HELLO && size > 0) {
        *(uint8_t *)answer = MAJOR_VERSION;
    }
}

bool is_possible(uint8_t command, uint64_t tail, const void *answer) {
    uint64_t numbers[2] = {};
    memcpy(numbers, answer, std::min<uint64_t>(sizeof numbers, answer_size(command, tail)));
    switch (command) {
    case ALLOC_BUFFER:
        return numbers[0] == 0 || numbers[1] >= tail; // memory of the size that was asked for
    case GET_ALIGNMENT:
        return numbers[0] && numbers[0] <= MOST_ALIGNMENT && !(numbers[0] & (numbers[0] - 1));
    case GET_MAX_SIZE:
    case BUFFER_GET_BASE:
        return numbers[0] != 0;
    case GET_ALLOC_SIZE:
        return numbers[0] <= MOST_MEMORY;
    case HELLO:
        return ((const uint8_t *)answer)[0] == MAJOR_VERSION && ((const uint8_t *)answer)[1] <= MINOR_VERSION;
    case DEVICE_COUNT:
        return numbers[0] == 1; // as edgespec's nodes say, and the same on each connection
    default:
        return true;
    }
}

} // namespace edgespec
