// Shared memory: what the ranks of a node lay out there, and the barrier of flag lines.
//
// Every rank has an arena (one file, mapped by its neighbours) and, in it, one control block for
// each channel. Only its owner writes to a block, but for the sleeper count. A barrier is flat:
// each rank writes the epoch into its own line and looks at all others. The line also carries
// what its rank calls, so checking a call costs no message of its own.
//
// Lines and slots are doubled. A rank may write epoch e + 2 only after it has seen e + 1 of all
// ranks, hence after all have read what belongs to e: two of each are enough, and no barrier is
// needed merely to protect them. May include wait.h.
#pragma once

#include "wait.h"

namespace distrt {
namespace shared {

constexpr uint32_t source_registered = 1, target_registered = 2;
constexpr uint64_t line_bytes = 64, pair_bytes = 128;

// The start of every arena.
struct alignas(pair_bytes) Arena {
    unsigned char nonce[16];
    Word abort;  // 1: this rank has given a call up, so nobody may wait for it
};

// What a rank says of its call. Offsets count from the start of the rank's arena.
struct Offer {
    uint32_t flags;
    uint64_t digest;
    uint64_t source, target;
    uint64_t bytes;  // of its source
};

struct alignas(line_bytes) Line {
    Word epoch;
    Offer offer;
};
static_assert(sizeof(Line) == line_bytes, "a flag and its offer travel in one cache line");

// A control block: head, then two lines, each directly followed by its inline slot, then two
// input slots and two result slots.
struct alignas(pair_bytes) Head {
    Word sleepers;
    alignas(line_bytes) Word ping;  // for round_trips alone
};

struct Layout {
    uint64_t inline_bytes, stage_bytes;

    static uint64_t padded(uint64_t bytes) { return (bytes + pair_bytes - 1) & ~(pair_bytes - 1); }
    uint64_t line(uint32_t epoch) const {
        return sizeof(Head) + (epoch & 1) * padded(line_bytes + inline_bytes);
    }
    uint64_t small(uint32_t epoch) const { return line(epoch) + line_bytes; }
    uint64_t stage(int slot) const {
        return line(0) + 2 * padded(line_bytes + inline_bytes) + slot * padded(stage_bytes);
    }
    uint64_t input(uint32_t piece) const { return stage(piece & 1); }
    uint64_t result(uint32_t piece) const { return stage(2 + (piece & 1)); }
    uint64_t total() const { return stage(4); }
};

// Where this process sees a rank's memory.
struct Neighbour {
    char* arena;
    char* control;
};

enum class Status { done, pending, mismatch, aborted, sized };

// The barrier of one channel, as one rank sees it.
class Barrier {
   public:
    Barrier(const Neighbour* ranks, int rank, int size, Layout layout, Patience patience,
            uint32_t epoch)
        : ranks_(ranks), layout_(layout), patience_(patience), rank_(rank), size_(size),
          epoch_(epoch) {
        // Both lines: an empty one would look like a later epoch where counting starts high.
        for (int i = 0; i < 2; ++i, ++epoch_)
            line(rank_).epoch.store(epoch, std::memory_order_release);
        epoch_ = epoch;
    }

    uint32_t next_epoch() const { return epoch_ + 1; }

    // Says that this rank has come; everything it wrote before is seen by those who saw it come.
    void arrive(const Offer& offer) {
        ++epoch_;
        waiting_for_ = 1;
        Line& own = line(rank_);
        own.offer = offer;
        own.epoch.store(epoch_, std::memory_order_seq_cst);
        if (head(rank_).sleepers.load(std::memory_order_seq_cst) != 0) wake_all(own.epoch);
    }

    // Returns done once all ranks have come, or pending after about `budget_ns`.
    Status wait(int64_t budget_ns) {
        for (; waiting_for_ < size_; ++waiting_for_) {
            const int other = (rank_ + waiting_for_) % size_;
            const Status status = wait_for(other, budget_ns);
            if (status != Status::done) return status;
        }
        return Status::done;
    }

    const Offer& offer(int rank) const { return line(rank).offer; }
    int aborted() const { return aborted_; }

    // Passes a word between ranks 0 and 1 to and fro, `rounds` times; the others do nothing.
    // Returns the seconds it took. Call it between two barriers.
    double round_trips(uint32_t rounds) {
        if (rank_ > 1) return 0;
        Word &own = head(rank_).ping, &other = head(1 - rank_).ping;
        own.store(0, std::memory_order_relaxed);
        const int64_t started = now_ns();
        for (uint32_t i = 1; i <= rounds; ++i) {
            if (rank_ == 0) own.store(i, std::memory_order_release);
            for (int looks = 0; other.load(std::memory_order_acquire) != i; ++looks)
                if (looks > 10000) sched_yield();
            if (rank_ == 1) own.store(i, std::memory_order_release);
        }
        return static_cast<double>(now_ns() - started) * 1e-9;
    }

    // Tells the neighbours that this rank has given a call up.
    void abort() { arena(rank_).abort.store(1, std::memory_order_seq_cst); }

   private:
    Line& line(int rank) const {
        return *reinterpret_cast<Line*>(ranks_[rank].control + layout_.line(epoch_));
    }
    Arena& arena(int rank) const { return *reinterpret_cast<Arena*>(ranks_[rank].arena); }
    Head& head(int rank) const { return *reinterpret_cast<Head*>(ranks_[rank].control); }

    Status wait_for(int other, int64_t budget_ns) {
        Word& epoch = line(other).epoch;
        for (int i = 0; i < patience_.spins; ++i) {
            if (reached(epoch.load(std::memory_order_acquire), epoch_)) return Status::done;
            relax();
        }
        int64_t until = 0;
        for (int round = 0;; ++round) {
            const uint32_t seen = epoch.load(std::memory_order_acquire);
            if (reached(seen, epoch_)) return Status::done;
            // The clock and the abort word are looked at now and then: a yield is cheaper.
            if (round % 16 == 0 || round > patience_.yields) {
                const int64_t now = now_ns();
                if (until == 0) until = now + budget_ns;
                if (any_aborted()) return Status::aborted;
                if (now >= until) return Status::pending;
            }
            if (round < patience_.yields)
                sched_yield();
            else
                sleep_until(epoch, seen, other, until);
        }
    }

    void sleep_until(Word& epoch, uint32_t seen, int other, int64_t until) {
        const int64_t left = until - now_ns();
        if (left > 0) sleep_on(epoch, seen, head(other).sleepers, left);
    }

    bool any_aborted() {
        for (int rank = 0; rank < size_; ++rank) {
            if (rank == rank_ || arena(rank).abort.load(std::memory_order_relaxed) == 0) continue;
            aborted_ = rank;
            return true;
        }
        return false;
    }

    const Neighbour* ranks_;
    Layout layout_;
    Patience patience_;
    int rank_, size_;
    uint32_t epoch_;
    int waiting_for_ = 1;
    int aborted_ = -1;
};

}  // namespace shared
}  // namespace distrt
