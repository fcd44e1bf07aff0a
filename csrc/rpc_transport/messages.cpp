// See messages.h.
#include "messages.h"

namespace edgespec {

namespace {

constexpr size_t MOST_HELD = 64 << 10;    // bytes: a larger part is not copied to others
constexpr size_t MOST_WAITING = 16 << 10; // bytes: requests that set tensors go at the latest then

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
    return add(&follows, sizeof follows) && add(&place, sizeof place) && (!is_new || add(graph, size));
}

bool Messages::send(const void *part, size_t size) {
    if (!is_client_) {
        return add(part, size);
    }
    const int n = n_parts_;
    n_parts_ = (n + 1) % 3;
    if (n == 0) {
        command_ = *(const uint8_t *)part;
    } else if (is_graph()) {
        return n == 1 || send_graph(part, size); // which says the size of what follows
    }
    return add(part, size);
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
    return true;
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

bool Messages::read_request(void *part, size_t size) {
    const int n = n_parts_;
    n_parts_ = (n + 1) % 3;
    if (n > 0 && is_graph()) {
        return n == 1 ? read_graph_size(part) : read_graph(part, size);
    }
    const bool received = read_(part, size);
    if (received && n == 0) {
        command_ = *(const uint8_t *)part;
    }
    return received;
}

} // namespace edgespec
