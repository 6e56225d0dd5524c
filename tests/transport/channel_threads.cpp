// Every call of csrc/shared/channel.h over threads, for ThreadSanitizer, with the product's own
// kernels: arenas are plain memory of this process and all limits are tiny. Each round draws,
// alike on all ranks, a call and a size around one of the limits; each rank draws for itself
// where its arrays lie and how late it comes. Arguments: ranks, stream_bytes, seed.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "channel.h"

using namespace distrt::shared;
namespace host = distrt::host;

namespace {

constexpr uint64_t window = 1 << 16, heap = 1 << 14, area = 1 << 13;
constexpr uint32_t first_epoch = 0xfffffff0u;
constexpr Layout layout{64, 256};
constexpr unsigned char untouched = 0xee;
// Elements of a fold and bytes of a move: around the line, both limits and several pieces.
const int64_t sizes[] = {0,  1,  15,  16,  17,  31,  32,  33,  63,  64,  65,   127,
                         128, 129, 191, 255, 256, 257, 331, 511, 512, 513, 769, 1031};

void check(bool fine, const char* what, int rank, int round) {
    if (fine) return;
    std::printf("wrong: %s on rank %d in round %d\n", what, rank, round);
    std::fflush(stdout);
    std::_Exit(2);
}

// int32, and bfloat16 whose partial results are float32. Sums stay below 256: exact in both.
struct Type {
    int64_t itemsize;
    Reduction reduction;

    static Type make(bool half) {
        using namespace host::index;
        const int64_t itemsize = half ? 2 : 4;
        const int fold = half ? fold_sum_bf16 : fold_sum_i32;
        const int finish = half ? finish_sum_bf16 : finish_sum_i32;
        return {itemsize, Reduction::make(host::baseline, fold, finish, itemsize, 1)};
    }
    void put(char* at, int64_t index, int value) const {
        const float real = static_cast<float>(value);
        uint32_t bits;
        std::memcpy(&bits, &real, 4);
        const uint16_t upper = static_cast<uint16_t>(bits >> 16);
        if (itemsize == 2)
            std::memcpy(at + 2 * index, &upper, 2);
        else
            std::memcpy(at + 4 * index, &value, 4);
    }
    bool has(const char* at, int64_t index, int value) const {
        char wanted[4];
        put(wanted, 0, value);
        return std::memcmp(at + itemsize * index, wanted, itemsize) == 0;
    }
};

class Rank {
   public:
    Rank(const std::vector<Neighbour>& ranks, int rank, int64_t stream_bytes, unsigned seed)
        : ranks_(ranks), rank_(rank), size_(static_cast<int>(ranks.size())),
          channel_(ranks, rank, window, layout, Patience{5, 3}, stream_bytes, first_epoch),
          alike_(seed), own_(seed * 31 + rank), plain_source_(area), plain_target_(area) {}

    void run() {
        for (round_ = 0; round_ < 240; ++round_) {
            const int verb = draw(9);
            const int64_t count = sizes[draw(sizeof sizes / sizeof *sizes)];
            root_ = draw(size_);
            const bool half = draw(2);
            place();
            if (own_() % 8 == 0) usleep(own_() % 2000);
            switch (verb) {
                case 0: all_reduce(Type::make(half), count, false, false); break;
                case 1: all_reduce(Type::make(half), count, true, half); break;
                case 2: reduce_scatter(Type::make(half), count); break;
                case 3: reduce(Type::make(half), count); break;
                case 4: broadcast(count); break;
                case 5: gather(count, true); break;
                case 6: gather(count, false); break;
                case 7: exchange(count / size_, true); break;
                case 8: exchange(count / size_, false); break;
            }
            if (round_ % 20 == 7) mismatch(count);
            if (round_ % 40 == 9) everybody_sleeps();
        }
        lost_rank();
    }

   private:
    int draw(int64_t below) { return static_cast<int>(alike_() % below); }

    void place() {
        char* registered = ranks_[rank_].arena + heap;
        source_ = own_() % 2 ? registered : plain_source_.data();
        target_ = own_() % 2 ? registered + area : plain_target_.data();
        std::memset(source_, untouched, area);
        std::memset(target_, untouched, area);
    }

    int value(int rank, int64_t i) const {
        return static_cast<int>((rank * 7 + i * 3 + round_) % 32);
    }
    int sum(int64_t i) const {
        int total = 0;
        for (int rank = 0; rank < size_; ++rank) total += value(rank, i);
        return total;
    }
    void fine(bool so, const char* what) const { check(so, what, rank_, round_); }

    // Nothing was written behind what the call gives.
    void ends(const char* target, int64_t bytes, const char* what) const {
        for (int64_t i = bytes; i < int64_t(area); ++i)
            if (static_cast<unsigned char>(target[i]) != untouched) fine(false, what);
    }

    // Impatient ranks come back with `pending` all the time.
    Status go(bool patient = true) {
        channel_.begin();
        for (;;) {
            const Status status = channel_.step(patient ? 100000000 : own_() % 3 * 1000);
            if (status != Status::pending) return status;
        }
    }

    Call& fold(const Type& type, int64_t count, uint64_t digest) {
        for (int64_t i = 0; i < count; ++i) type.put(source_, i, value(rank_, i));
        Call& call = channel_.prepare();
        call.digest = digest;
        call.source = source_;
        call.target = target_;
        call.folds = true;
        call.reduction = type.reduction;
        return call;
    }

    void all_reduce(const Type& type, int64_t count, bool in_place, bool patient) {
        Call& call = fold(type, count, 1);
        if (in_place) call.target = source_;
        channel_.even_chunks(count, type.itemsize);
        fine(go(patient) == Status::done, "all_reduce's status");
        const char* result = in_place ? source_ : target_;
        for (int64_t i = 0; i < count; ++i) fine(type.has(result, i, sum(i)), "all_reduce");
        ends(result, count * type.itemsize, "all_reduce's end");
    }

    void reduce_scatter(const Type& type, int64_t count) {
        Call& call = fold(type, count, 2);
        call.deliver = Deliver::owner;
        int64_t start = 0;
        for (int rank = 0; rank < size_; ++rank) {  // uneven, and not at cache lines
            const int64_t left = count - start;
            const int64_t length = rank + 1 == size_ ? left : left * (1 + rank % 2) / 3;
            call.chunks.push_back({start, length});
            start += length;
        }
        const Span mine = call.chunks[rank_];
        fine(go() == Status::done, "reduce_scatter's status");
        for (int64_t i = 0; i < mine.length; ++i)
            fine(type.has(target_, i, sum(mine.offset + i)), "reduce_scatter");
        ends(target_, mine.length * type.itemsize, "reduce_scatter's end");
    }

    void reduce(const Type& type, int64_t count) {
        Call& call = fold(type, count, 3);
        call.deliver = Deliver::root;
        call.root = root_;
        if (rank_ != root_) call.target = nullptr;
        channel_.even_chunks(count, type.itemsize);
        fine(go() == Status::done, "reduce's status");
        const int64_t given = rank_ == root_ ? count : 0;
        for (int64_t i = 0; i < given; ++i) fine(type.has(target_, i, sum(i)), "reduce");
        ends(target_, given * type.itemsize, "reduce's end");
    }

    Call& move(int64_t source_bytes, uint64_t digest) {
        for (int64_t i = 0; i < source_bytes; ++i) source_[i] = byte(rank_, i);
        Call& call = channel_.prepare();
        call.digest = digest;
        call.source = source_;
        call.source_bytes = source_bytes;
        call.target = target_;
        return call;
    }
    char byte(int rank, int64_t i) const { return static_cast<char>(rank * 71 + i * 3 + round_); }

    void broadcast(int64_t bytes) {
        Call& call = move(rank_ == root_ ? bytes : 0, 4);
        for (int from = 0; from < size_; ++from) {
            call.pulls.push_back({0, from == root_ ? bytes : 0});
            call.places.push_back(0);
        }
        fine(go(false) == Status::done, "broadcast's status");
        for (int64_t i = 0; i < bytes; ++i) fine(target_[i] == byte(root_, i), "broadcast");
        ends(target_, bytes, "broadcast's end");
    }

    // Parts of different lengths, some of which travel inline while others pass the slots.
    void gather(int64_t bytes, bool to_all) {
        const auto part = [&](int rank) { return bytes * ((rank + round_) % 3) / 2; };
        Call& call = move(part(rank_), 5 + to_all);
        call.target = nullptr;
        call.gathers = true;
        fine(go() == Status::sized, "gather's first status");
        int64_t joined = 0;
        for (int rank = 0; rank < size_; ++rank) {
            fine(channel_.offered_bytes(rank) == part(rank), "gather's sizes");
            joined += part(rank);
        }
        const bool takes = to_all || rank_ == root_;
        channel_.set_target(takes ? target_ : nullptr, joined);
        Status status;
        while ((status = channel_.step(1000000)) == Status::pending) {}
        fine(status == Status::done, "gather's status");
        int64_t at = 0;
        for (int rank = 0; takes && rank < size_; ++rank)
            for (int64_t i = 0; i < part(rank); ++i, ++at)
                fine(target_[at] == byte(rank, i), "gather");
        ends(target_, at, "gather's end");
    }

    // all_to_all, or the root's scatter.
    void exchange(int64_t share, bool all) {
        Call& call = move(all || rank_ == root_ ? share * size_ : 0, 7 + all);
        for (int from = 0; from < size_; ++from) {
            call.pulls.push_back({rank_ * share, all || from == root_ ? share : 0});
            call.places.push_back(all ? from * share : 0);
        }
        fine(go() == Status::done, "exchange's status");
        const int blocks = all ? size_ : 1;
        for (int block = 0; block < blocks; ++block)
            for (int64_t i = 0; i < share; ++i)
                fine(target_[block * share + i] == byte(all ? block : root_, rank_ * share + i),
                     "exchange");
        ends(target_, share * blocks, "exchange's end");
    }

    // One rank makes another call than the others: all see it, nothing is written.
    void mismatch(int64_t count) {
        place();
        fold(Type::make(false), count, 100 + (rank_ == root_));
        channel_.even_chunks(count, 4);
        fine(go() == Status::mismatch, "a mismatch is seen by all");
        ends(target_, 0, "a mismatch writes nothing");
    }

    // The root comes when it has seen all others asleep, or the test fails.
    void everybody_sleeps() {
        if (rank_ == root_) {
            const auto& head = *reinterpret_cast<const Head*>(ranks_[rank_].control);
            const int64_t until = now_ns() + 20'000'000'000;
            while (head.sleepers.load() != uint32_t(size_ - 1)) {
                fine(now_ns() < until, "nobody falls asleep");
                usleep(100);
            }
        }
        place();
        all_reduce(Type::make(false), 331, false, true);
    }

    // The root never comes to the last call and says so.
    void lost_rank() {
        if (rank_ == root_) {
            usleep(3000);
            channel_.abort();
            return;
        }
        place();
        fold(Type::make(false), 513, 9);
        channel_.even_chunks(513, 4);
        fine(go() == Status::aborted && channel_.aborted() == root_, "the lost rank is named");
        ends(target_, 0, "a call given up writes nothing");
    }

    const std::vector<Neighbour>& ranks_;
    const int rank_, size_;
    Channel channel_;
    std::minstd_rand alike_, own_;
    std::vector<char> plain_source_, plain_target_;
    char *source_ = nullptr, *target_ = nullptr;
    int round_ = 0, root_ = 0;
};

}  // namespace

int main(int, char** arguments) {
    const int size = std::atoi(arguments[1]);
    std::vector<Neighbour> neighbours;
    for (int rank = 0; rank < size; ++rank) {
        auto* arena = static_cast<char*>(std::aligned_alloc(4096, window));
        std::memset(arena, 0, window);
        neighbours.push_back({arena, arena + 4096});
    }
    std::vector<Rank*> ranks;
    for (int rank = 0; rank < size; ++rank)
        ranks.push_back(
            new Rank(neighbours, rank, std::atoll(arguments[2]), std::atoi(arguments[3])));
    std::vector<std::thread> threads;
    for (Rank* rank : ranks) threads.emplace_back(&Rank::run, rank);
    for (auto& thread : threads) thread.join();
    std::printf("fine\n");
}
