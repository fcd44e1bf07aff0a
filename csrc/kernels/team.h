// A few threads that run the same function and meet at barriers.
//
// OpenMP's threads, because ggml's own operations run on the same ones: a second pool would fight with
// the first, which waits actively. The barrier is ours: less than half the cost of libgomp's.
#pragma once

#include <atomic>
#include <omp.h>
#include <sched.h>

#ifdef __SANITIZE_THREAD__
#include <thread>
#include <vector>
#endif

namespace edgespec {

class Team {
  public:
    void set_size(int n) { size_.store(n, std::memory_order_relaxed); } // each thread itself: no need to wait for another
    int size() const { return size_.load(std::memory_order_relaxed); }

    void barrier() {
        const int n = size();
        if (n == 1) {
            return;
        }
        const unsigned round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == n - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round;) {
            if (++spins < SPINS) {
                pause();
            } else {
                // More threads than processors, or another job: let the last one arrive. To sleep in a futex
                // instead was measured: 10 % slower beside one busy process, 10 % faster beside two to four.
                sched_yield();
            }
        }
    }

  private:
    static void pause() {
#ifdef __aarch64__
        __asm__ volatile("isb"); // `yield` does nothing on the processors that are meant here
#else
        __builtin_ia32_pause();
#endif
    }
    static constexpr int SPINS = 1 << 10;
    std::atomic<int> size_{1};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> round_{0};
};

// Run body(team, thread) on `n_threads` threads and wait for all.
template <class Body> void run_team(int n_threads, const Body &body) {
    Team team;
#ifdef __SANITIZE_THREAD__ // which cannot see that libgomp starts and joins its threads
    team.set_size(n_threads);
    std::vector<std::thread> threads;
    for (int i = 1; i < n_threads; i++) {
        threads.emplace_back([&, i] { body(team, i); });
    }
    body(team, 0);
    for (std::thread &thread : threads) {
        thread.join();
    }
#else
#pragma omp parallel num_threads(n_threads)
    {
        team.set_size(omp_get_num_threads()); // fewer may have come
        body(team, omp_get_thread_num());
    }
#endif
}

} // namespace edgespec
