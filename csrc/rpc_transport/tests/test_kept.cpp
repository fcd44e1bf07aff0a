// Weights in a folder: whole or not at all, whatever the disk says.
#include "../../fnv.h"
#include "../../tests/check.h"
#include "../kept.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace fs = std::filesystem;
using Bytes = std::vector<uint8_t>;

static Bytes random_bytes(uint64_t *state, size_t size) {
    Bytes bytes(size);
    for (uint8_t &byte : bytes) {
        byte = (uint8_t)random_bits(state);
    }
    return bytes;
}

static size_t n_files(const fs::path &folder) {
    return (size_t)std::distance(fs::directory_iterator(folder), fs::directory_iterator());
}

static bool is_kept(const fs::path &folder, const Bytes &bytes) {
    char name[17];
    snprintf(name, sizeof name, "%016llx", (unsigned long long)es_fnv1a(bytes.data(), bytes.size(), ES_FNV_BASIS));
    std::ifstream file(folder / name, std::ios::binary);
    return file && Bytes(std::istreambuf_iterator<char>(file), {}) == bytes;
}

int main() {
    char made[] = "/tmp/edgespec-kept-XXXXXX";
    CHECK(mkdtemp(made));
    const fs::path folder = made;
    uint64_t state = 5;
    const Bytes first = random_bytes(&state, 300000), second = random_bytes(&state, 200000);
    edgespec::keep(first.data(), first.size());
    CHECK(n_files(folder) == 0); // nobody has said where
    es_rpc_keep_in(made, UINT64_MAX);
    edgespec::keep(first.data(), first.size());
    es_rpc_keep_in(made, (uint64_t)1 << 60);
    edgespec::keep(first.data(), first.size());
    CHECK(n_files(folder) == 0); // more is to stay free than there is
    es_rpc_keep_in(made, 0);
    edgespec::keep(first.data(), first.size());
    CHECK(n_files(folder) == 1 && is_kept(folder, first));

    // A write that fails in the middle, as on a disk that is full by then.
    signal(SIGXFSZ, SIG_IGN);
    rlimit limit;
    CHECK(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    const rlim_t before = limit.rlim_cur;
    limit.rlim_cur = 100000;
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    edgespec::keep(second.data(), second.size());
    edgespec::keep(first.data(), first.size());
    CHECK(n_files(folder) == 1 && is_kept(folder, first));
    limit.rlim_cur = before;
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    edgespec::keep(second.data(), second.size());
    CHECK(n_files(folder) == 2 && is_kept(folder, second));

    es_rpc_keep_in(NULL, 0);
    fs::remove_all(folder);
    edgespec::keep(first.data(), first.size());
    es_rpc_keep_in(made, 0);
    edgespec::keep(first.data(), first.size()); // there is no such folder any more
    CHECK(!fs::exists(folder));
    return 0;
}
