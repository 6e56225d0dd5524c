// Shared memory: how a rank waits for another one.
//
// A waiter spins briefly, then yields, then sleeps on the word itself with a shared futex. Ranks
// that share a core would burn each other's time by spinning, so `Patience::spins` is small
// there. Includes only the system; knows nothing of lines or calls.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace distrt {
namespace shared {

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free, "a futex is 32 bits");

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

// Cyclic: right as long as two ranks are less than 2^31 epochs apart; the protocol keeps them
// within two.
inline bool reached(uint32_t epoch, uint32_t wanted) {
    return static_cast<int32_t>(epoch - wanted) >= 0;
}

struct Patience {
    int spins = 2000;    // looks at the word before the first yield
    int yields = 200;    // yields before the first sleep
};

// A sleep is never longer than this, so that a waiter comes back for the abort words.
constexpr int64_t longest_sleep_ns = 5000000;

// Sleeps until `word` differs from `seen`, is woken, or `ns` have passed. `sleepers` stands in
// the memory of the word's owner: it is raised before the futex looks at the word, and the owner
// reads it after it has changed the word, both in sequentially consistent order, so at least one
// of the two sees the other.
inline void sleep_on(Word& word, uint32_t seen, Word& sleepers, int64_t ns) {
    if (ns > longest_sleep_ns) ns = longest_sleep_ns;
    timespec limit{ns / 1000000000, ns % 1000000000};
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

inline void wake_all(Word& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr,
            0);
}

}  // namespace shared
}  // namespace distrt
