// The protocol of csrc/shared over threads, for ThreadSanitizer: every arena is plain memory of
// this process, flags start just before they wrap, and all limits are tiny.
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "channel.h"

using namespace distrt::shared;

static void fold(void* out, const void* partial, const void* local, long long count) {
    for (long long i = 0; i < count; ++i)
        static_cast<int*>(out)[i] = static_cast<const int*>(partial)[i] + static_cast<const int*>(local)[i];
}
static void finish(void* out, const void* partial, const void* local, long long count, double) {
    fold(out, partial, local, count);
}

static void check(bool fine, const char* what) {
    if (fine) return;
    std::printf("wrong: %s\n", what);
    std::exit(2);
}

constexpr uint64_t window = 1 << 16, heap = 1 << 15;

static Status run(Channel& channel) {
    channel.begin();
    for (;;) {
        const Status status = channel.step(1000000);
        if (status != Status::pending) return status;
    }
}

static Call& folding(Channel& channel, int* source, int* target, int64_t count, uint64_t digest) {
    Call& call = channel.prepare();
    call.digest = digest;
    call.source = reinterpret_cast<char*>(source);
    call.target = reinterpret_cast<char*>(target);
    call.folds = true;
    call.reduction.fold = fold;
    call.reduction.finish = finish;
    call.reduction.itemsize = sizeof(int);
    channel.even_chunks(count, sizeof(int));
    return call;
}

static void rank_body(Channel& channel, char* arena, int rank, int size) {
    auto* registered = reinterpret_cast<int*>(arena + heap);
    std::vector<int> plain(600), other(600);
    for (int round = 0; round < 60; ++round) {
        const int64_t count = (round * 37) % 300;
        // Who uses registered memory changes from call to call and from rank to rank.
        const bool in_arena = (round + rank) % 3 == 0, in_place = round % 2 == 0;
        int* source = in_arena ? registered : plain.data();
        int* target = in_place ? source : in_arena ? registered + 300 : other.data();
        for (int64_t i = 0; i < count; ++i) source[i] = static_cast<int>(i) + rank + round;
        folding(channel, source, target, count, 1);
        check(run(channel) == Status::done, "status");
        for (int64_t i = 0; i < count; ++i)
            check(target[i] == size * (static_cast<int>(i) + round) + size * (size - 1) / 2, "all_reduce");

        Call& call = channel.prepare();
        call.digest = 2;
        for (int64_t i = 0; i < count; ++i) source[i] = 1000 * rank + static_cast<int>(i);
        call.source = reinterpret_cast<char*>(source);
        call.source_bytes = rank == round % size ? count * int64_t(sizeof(int)) : 0;
        call.target = reinterpret_cast<char*>(other.data());
        for (int from = 0; from < size; ++from) {
            call.pulls.push_back({0, from == round % size ? count * int64_t(sizeof(int)) : 0});
            call.places.push_back(0);
        }
        check(run(channel) == Status::done, "status");
        for (int64_t i = 0; i < count; ++i)
            check(other[i] == 1000 * (round % size) + static_cast<int>(i), "broadcast");
        if (round % 10 == 9) {
            folding(channel, source, target, count, 3 + rank);
            check(run(channel) == Status::mismatch, "a mismatch is seen by all");
        }
    }
}

int main(int, char** arguments) {
    const int size = std::atoi(arguments[1]);
    std::vector<char*> arenas;
    std::vector<Neighbour> ranks;
    const Layout layout{64, 256};
    for (int rank = 0; rank < size; ++rank) {
        arenas.push_back(static_cast<char*>(std::aligned_alloc(4096, window)));
        std::memset(arenas[rank], 0, window);
        ranks.push_back({arenas[rank], arenas[rank] + 4096});
    }
    std::vector<Channel*> channels;
    for (int rank = 0; rank < size; ++rank)
        channels.push_back(new Channel(ranks, rank, window, layout, Patience{5, 3}, 1 << 30, 0xfffffff0u));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank)
        threads.emplace_back(rank_body, std::ref(*channels[rank]), arenas[rank], rank, size);
    for (auto& thread : threads) thread.join();
    std::printf("fine\n");
}
