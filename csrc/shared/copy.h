// Shared memory: copies that keep large buffers out of the cache. Includes only the system.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace distrt {
namespace shared {

// Orders streaming stores before a later release store of a flag; release alone does not.
inline void store_fence() {
#if defined(__x86_64__)
    _mm_sfence();
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

// memcpy with streaming stores: the lines go to memory without being read first.
inline void stream_copy(void* to, const void* from, size_t bytes) {
#if defined(__x86_64__)
    auto* out = static_cast<char*>(to);
    auto* in = static_cast<const char*>(from);
    const size_t head = (64 - reinterpret_cast<uintptr_t>(out) % 64) % 64;
    if (bytes < head + 64) {
        std::memcpy(out, in, bytes);
        return;
    }
    std::memcpy(out, in, head);
    out += head, in += head, bytes -= head;
    for (; bytes >= 64; bytes -= 64, out += 64, in += 64) {
        const auto* load = reinterpret_cast<const __m128i*>(in);
        auto* store = reinterpret_cast<__m128i*>(out);
        const __m128i a = _mm_loadu_si128(load), b = _mm_loadu_si128(load + 1);
        const __m128i c = _mm_loadu_si128(load + 2), d = _mm_loadu_si128(load + 3);
        _mm_stream_si128(store, a), _mm_stream_si128(store + 1, b);
        _mm_stream_si128(store + 2, c), _mm_stream_si128(store + 3, d);
    }
    std::memcpy(out, in, bytes);
#else
    std::memcpy(to, from, bytes);
#endif
}

inline void copy(void* to, const void* from, size_t bytes, bool streams) {
    if (to == from || bytes == 0) return;
    if (streams)
        stream_copy(to, from, bytes);
    else
        std::memcpy(to, from, bytes);
}

}  // namespace shared
}  // namespace distrt
