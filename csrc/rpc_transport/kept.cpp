// See kept.h.
//
// ggml's server (ggml-rpc.cpp) would write these files itself, and not see that the disk is full. When the next client
// names the hash, it hands over what is in the file without a look at it. So a file gets its name here when it is complete.
#include "kept.h"

#include "../fnv.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <string>

namespace {

struct Keeping {
    std::string folder; // "": nothing is kept
    uint64_t least_free = 0;
};

// Of the process, because ggml makes a server's connections itself and hands nothing down.
Keeping &keeping() {
    static Keeping *const k = new Keeping;
    return *k;
}

bool has_room(const Keeping &to, size_t size) {
    struct statvfs disk;
    if (statvfs(to.folder.c_str(), &disk) != 0) {
        return false;
    }
    const uint64_t free = (uint64_t)disk.f_bavail * disk.f_frsize;
    return free >= size && free - size >= to.least_free;
}

bool write_file(const std::string &path, const uint8_t *bytes, size_t size) {
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) {
        return false;
    }
    size_t done = 0;
    while (done < size) {
        const ssize_t n = write(fd, bytes + done, size - done);
        if (n > 0) {
            done += (size_t)n;
        } else if (n == 0 || errno != EINTR) {
            break;
        }
    }
    return close(fd) == 0 && done == size; // some file systems say only now that there was no room
}

} // namespace

namespace edgespec {

void keep(const uint8_t *bytes, size_t size) {
    const Keeping &to = keeping();
    if (to.folder.empty() || !has_room(to, size)) {
        return;
    }
    char name[17];
    snprintf(name, sizeof name, "%016" PRIx64, es_fnv1a(bytes, size, ES_FNV_BASIS));
    const std::string part = to.folder + "/part", file = to.folder + "/" + name;
    if (!write_file(part, bytes, size) || rename(part.c_str(), file.c_str()) != 0) {
        unlink(part.c_str());
    }
}

} // namespace edgespec

extern "C" void es_rpc_keep_in(const char *folder, uint64_t least_free) {
    keeping().folder = folder ? folder : "";
    keeping().least_free = least_free;
}
