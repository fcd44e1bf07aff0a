// See messages.h.
#include "messages.h"

#include "../fnv.h"

namespace edgespec {

namespace {

constexpr size_t MOST_HELD = 64 << 10;    // bytes: a larger part is not copied to others
constexpr size_t MOST_WAITING = 16 << 10; // bytes: requests that set tensors go at the latest then
constexpr size_t LEAST_KEPT = 64 << 10;   // bytes: smaller weights are sent sooner than asked for
// Bytes of a request's data. ggml takes memory of the size that a request names, and ends the process if there is none.
constexpr uint64_t MOST_DATA = (uint64_t)16 << 30;

// The data of SET_TENSOR: ggml's rpc_tensor, whether it shall be kept, where in the tensor the bytes begin, and these.
constexpr size_t TENSOR_BYTES = 296, NAME_AT = 228, KEEP_AT = TENSOR_BYTES, BYTES_AT = TENSOR_BYTES + 1 + 8;
constexpr char WEIGHTS[] = "blk."; // the beginning of their names, and of no other tensor's

} // namespace

bool Messages::write_held() {
    const bool written = held_.empty() || write_(held_.data(), held_.size());
    held_.clear();
    return written;
}

bool Messages::add(const void *bytes, size_t size) {
    if (size <= MOST_HELD) {
        held_.insert(held_.end(), (const uint8_t *)bytes, (const uint8_t *)bytes + size);
        return true;
    }
    return write_held() && write_(bytes, size);
}

bool Messages::send_graph(const void *graph, size_t size) {
    const uint8_t place = graphs_.find(graph, size);
    const bool is_new = place == KnownGraphs::NEW;
    const uint64_t follows = sizeof place + (is_new ? size : 0);
    if (is_new) {
        graphs_.add(graph, size);
    } else {
        graphs_.use(place);
    }
    return add(&command_, sizeof command_) && add(&follows, sizeof follows) && add(&place, sizeof place) &&
           (!is_new || add(graph, size));
}

bool Messages::send_whole(const void *data, size_t size) {
    const uint64_t follows = size;
    return add(&command_, sizeof command_) && add(&follows, sizeof follows) && add(data, size);
}

// Asks whether the node keeps these bytes; it then puts them into the tensor.
bool Messages::is_there(const uint8_t *data, size_t size, bool &there) {
    const uint64_t hash = es_fnv1a(data + BYTES_AT, size - BYTES_AT, ES_FNV_BASIS);
    const uint8_t command = SET_TENSOR_HASH;
    const uint64_t follows = TENSOR_BYTES + 2 * sizeof(uint64_t);
    uint64_t answer_size = 0;
    uint8_t answer = 0;
    const bool asked = add(&command, sizeof command) && add(&follows, sizeof follows) && add(data, TENSOR_BYTES) &&
                       add(data + KEEP_AT + 1, sizeof(uint64_t)) && add(&hash, sizeof hash) && write_held();
    if (!asked || !read_(&answer_size, sizeof answer_size) || answer_size != sizeof answer || !read_(&answer, sizeof answer)) {
        return false;
    }
    there = answer != 0;
    return true;
}

bool Messages::send_tensor(const void *data, size_t size) {
    const uint8_t *const bytes = (const uint8_t *)data;
    if (size < BYTES_AT + LEAST_KEPT || bytes[KEEP_AT] || memcmp(bytes + NAME_AT, WEIGHTS, sizeof WEIGHTS - 1) != 0) {
        return send_whole(data, size); // or ggml has asked itself
    }
    bool there = false;
    if (!is_there(bytes, size, there) || there) {
        return there;
    }
    const uint8_t keep = 1;
    const uint64_t follows = size;
    return add(&command_, sizeof command_) && add(&follows, sizeof follows) && add(data, KEEP_AT) && add(&keep, sizeof keep) &&
           add(bytes + KEEP_AT + 1, size - KEEP_AT - 1);
}

bool Messages::send(const void *part, size_t size) {
    if (!is_client_) {
        return add(part, size);
    }
    const int n = n_parts_;
    n_parts_ = (n + 1) % 3;
    if (n == 0) {
        command_ = *(const uint8_t *)part;
    }
    if (n < 2) {
        return true; // the size is that of the data, which is not yet here
    }
    return command_ == SET_TENSOR ? send_tensor(part, size) : is_graph() ? send_graph(part, size) : send_whole(part, size);
}

bool Messages::flush() {
    return (is_client_ && command_ == SET_TENSOR && held_.size() < MOST_WAITING) || write_held();
}

bool Messages::read_graph_size(void *part) {
    uint64_t follows = 0;
    if (!read_(&follows, sizeof follows) || follows == 0 || !read_(&place_, sizeof place_)) {
        return false;
    }
    const bool is_new = place_ == KnownGraphs::NEW;
    if (!is_new && (follows != sizeof place_ || place_ >= graphs_.size())) {
        return false;
    }
    const uint64_t size = is_new ? follows - sizeof place_ : graphs_.at(place_).size();
    memcpy(part, &size, sizeof size);
    return size <= MOST_DATA;
}

bool Messages::read_graph(void *graph, size_t size) {
    if (place_ != KnownGraphs::NEW) {
        memcpy(graph, graphs_.at(place_).data(), size);
        graphs_.use(place_);
        return true;
    }
    const bool received = read_(graph, size);
    if (received) {
        graphs_.add(graph, size);
    }
    return received;
}

// Keeps what a client wants to be kept, and lets ggml keep nothing.
void Messages::keep_weights(uint8_t *data, size_t size) {
    if (size > BYTES_AT && data[KEEP_AT]) {
        keep_(data + BYTES_AT, size - BYTES_AT);
        data[KEEP_AT] = 0;
    }
}

bool Messages::read_request(void *part, size_t size) {
    const int n = n_parts_;
    n_parts_ = (n + 1) % 3;
    if (n > 0 && is_graph()) {
        return n == 1 ? read_graph_size(part) : read_graph(part, size);
    }
    if (!read_(part, size)) {
        return false;
    }
    if (n == 0) {
        command_ = *(const uint8_t *)part;
    } else if (n == 1) {
        uint64_t follows = 0;
        memcpy(&follows, part, sizeof follows);
        return follows <= MOST_DATA;
    } else if (command_ == SET_TENSOR) {
        keep_weights((uint8_t *)part, size);
    }
    return true;
}

} // namespace edgespec
