// Shared memory: the collectives of one channel, as resumable steps (algorithm `direct`).
//
// A fold (all_reduce, reduce_scatter, reduce): rank r folds chunk r of all ranks' sources in rank
// order and stores the result where it is wanted. A move (all_gather, broadcast, gather, scatter,
// all_to_all): every rank pulls what it wants out of the others' sources. Registered sources and
// targets are used where they lie, in one piece between two barriers. Others go through the
// channel's slots, piece by piece, one barrier for each: while a piece is folded the next one is
// already copied in. A short call travels in the slot behind the flag line, with one barrier.
// Ranks may mix registered and other memory. May include line.h, fold.h.
#pragma once

#include <vector>

#include "fold.h"
#include "line.h"

namespace distrt {
namespace shared {

struct Span {
    int64_t offset, length;  // elements in a fold, bytes in a move
};

enum class Deliver { all, owner, root };

// Joins a value to a digest; source: the finalizer of MurmurHash3, Appleby, 2011.
inline uint64_t mix(uint64_t digest, uint64_t value) {
    uint64_t x = (digest ^ value) + 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdu;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53u;
    return x ^ (x >> 33);
}

struct Call {
    uint64_t digest = 0;  // must be equal on all ranks
    const char* source = nullptr;
    char* target = nullptr;
    // A fold: chunk r of the source is folded by rank r. `owner` stores it at the start of
    // rank r's target, `root` only in the target of `root`.
    bool folds = false;
    Reduction reduction;
    std::vector<Span> chunks;
    Deliver deliver = Deliver::all;
    int root = 0;
    // A move: from each rank's source, what this rank takes and where it puts it. Sources are
    // `source_bytes` long. With `gathers` everything is taken and joined in rank order.
    int64_t source_bytes = 0;
    bool gathers = false, sized = false;
    std::vector<Span> pulls;
    std::vector<int64_t> places;
    int64_t target_bytes = 0;
};

class Channel {
   public:
    Channel(std::vector<Neighbour> ranks, int rank, uint64_t window, Layout layout,
            Patience patience, int64_t stream_bytes, uint32_t epoch)
        : ranks_(std::move(ranks)), size_(static_cast<int>(ranks_.size())), rank_(rank),
          window_(window), layout_(layout), stream_bytes_(stream_bytes),
          barrier_(ranks_.data(), rank, size_, layout, patience, epoch), offers_(size_),
          sources_(size_) {}

    int rank() const { return rank_; }
    int size() const { return size_; }
    int aborted() const { return barrier_.aborted(); }
    void abort() { barrier_.abort(); }
    double round_trips(uint32_t rounds) { return barrier_.round_trips(rounds); }
    bool running() const { return phase_ != Phase::idle; }
    // Bytes of each rank's source, known after the first barrier of a move.
    int64_t offered_bytes(int rank) const { return static_cast<int64_t>(offers_[rank].bytes); }

    // For the benchmark: the memory traffic alone. Nobody is told, nobody is waited for; results
    // mean nothing. The last call made before must have had the same arguments.
    bool unsynchronised = false;

    // The next call, to be filled in; its vectors keep their memory from call to call.
    Call& prepare() {
        call_.source = nullptr;
        call_.target = nullptr;
        call_.folds = call_.gathers = call_.sized = false;
        call_.reduction = Reduction{};
        call_.deliver = Deliver::all;
        call_.root = 0;
        call_.source_bytes = call_.target_bytes = 0;
        call_.chunks.clear();
        call_.pulls.clear();
        call_.places.clear();
        return call_;
    }

    // Starts the prepared call. Calls are numbered, so that one more or less is noticed.
    void begin() {
        call_.digest = mix(call_.digest, ++calls_);
        phase_ = Phase::arrive;
    }

    // Says where a gather, whose step returned `sized`, puts what it takes.
    void set_target(char* target, int64_t bytes) {
        call_.target = target;
        call_.target_bytes = bytes;
        call_.sized = true;
    }

    // Cuts `count` elements into a chunk for each rank, at cache lines: no two ranks fold into
    // the same line.
    void even_chunks(int64_t count, int64_t itemsize) {
        const int64_t line = std::max<int64_t>(1, int64_t(line_bytes) / itemsize);
        const int64_t share = (count + size_ - 1) / size_;
        const int64_t length = (share + line - 1) / line * line;
        for (int rank = 0; rank < size_; ++rank) {
            const int64_t start = std::min(rank * length, count);
            call_.chunks.push_back({start, std::min(length, count - start)});
        }
    }

    // Goes on with the call; returns `pending` after waiting for about `budget_ns`.
    Status step(int64_t budget_ns) {
        for (;;) {
            switch (phase_) {
                case Phase::idle: return Status::done;
                case Phase::arrive: arrive(); break;
                case Phase::first: {
                    const Status status = wait(budget_ns);
                    if (status != Status::done) return status;
                    if (!accept()) return finish(Status::mismatch);
                    if (small_) return finish(run_small());
                    phase_ = Phase::accepted;
                    break;
                }
                case Phase::accepted:
                    if (call_.gathers && !call_.sized) return Status::sized;
                    plan();
                    run_piece();
                    if (last_barrier()) return finish(Status::done);
                    break;
                case Phase::piece: {
                    const Status status = wait(budget_ns);
                    if (status != Status::done) return status;
                    if (call_.folds) take_results();
                    ++piece_, ++slot_;
                    if (piece_ >= pieces_) return finish(Status::done);
                    run_piece();
                    if (last_barrier()) return finish(Status::done);
                    break;
                }
            }
        }
    }

   private:
    enum class Phase { idle, arrive, first, accepted, piece };

    bool registered(const void* address) const {
        const auto at = reinterpret_cast<uintptr_t>(address);
        const auto base = reinterpret_cast<uintptr_t>(ranks_[rank_].arena);
        return at >= base && at < base + window_;
    }
    uint64_t offset_of(const void* address) const {
        return static_cast<uint64_t>(static_cast<const char*>(address) - ranks_[rank_].arena);
    }
    char* input(int rank) const { return ranks_[rank].control + layout_.input(slot_); }
    char* result(int rank) const { return ranks_[rank].control + layout_.result(slot_); }
    bool has(int rank, uint32_t flag) const { return (offers_[rank].flags & flag) != 0; }

    Status wait(int64_t budget_ns) {
        return unsynchronised ? Status::done : barrier_.wait(budget_ns);
    }
    void publish(const Offer& offer) {
        if (!unsynchronised) barrier_.arrive(offer);
    }
    Status finish(Status status) {
        phase_ = Phase::idle;
        return status;
    }

    int64_t fold_count() const {
        int64_t count = 0;
        for (const Span& chunk : call_.chunks) count += chunk.length;
        return count;
    }

    void arrive() {
        own_ = Offer{};
        own_.digest = call_.digest;
        own_.bytes = call_.folds ? fold_count() * call_.reduction.itemsize : call_.source_bytes;
        piece_ = 0;
        // All ranks count their barriers alike, so the first one of a call has one epoch.
        first_epoch_ = barrier_.next_epoch();
        // A fold is short or long on all ranks alike; in a move each source is for itself.
        const bool fits = own_.bytes <= layout_.inline_bytes;
        small_ = fits && call_.folds;
        if (fits) {
            copy(ranks_[rank_].control + layout_.small(first_epoch_), call_.source, own_.bytes, false);
        } else if (registered(call_.source)) {
            own_.flags |= source_registered;
            own_.source = offset_of(call_.source);
        }
        if (call_.target != nullptr && registered(call_.target)) {
            own_.flags |= target_registered;
            own_.target = offset_of(call_.target);
        }
        if (!fits) copy_in(0);
        publish(own_);
        phase_ = Phase::first;
    }

    bool accept() {
        if (unsynchronised) return true;
        bool equal = true;
        for (int rank = 0; rank < size_; ++rank) {
            offers_[rank] = barrier_.offer(rank);
            equal = equal && offers_[rank].digest == call_.digest;
        }
        return equal;
    }

    bool is_small(int rank) const { return offers_[rank].bytes <= layout_.inline_bytes; }

    // Reads the inline slots: protected by the two lines, so no barrier follows.
    Status run_small() {
        const int64_t itemsize = call_.reduction.itemsize;
        int64_t first = 0, count = fold_count();
        if (call_.deliver == Deliver::owner) {
            first = call_.chunks[rank_].offset;
            count = call_.chunks[rank_].length;
        }
        if (call_.target == nullptr || count == 0) return Status::done;
        for (int rank = 0; rank < size_; ++rank)
            sources_[rank] = ranks_[rank].control + layout_.small(first_epoch_) + first * itemsize;
        targets_.assign(1, call_.target);
        folder_.run(call_.reduction, sources_, targets_, count, false);
        return Status::done;
    }

    // After the first barrier: in how many pieces, and does anyone use the slots?
    void plan() {
        bool staged = false, closes = false;
        int64_t longest = 0;
        for (int rank = 0; rank < size_; ++rank) {
            const bool source = has(rank, source_registered);
            const bool wanted = call_.deliver != Deliver::root || rank == call_.root;
            const bool target = has(rank, target_registered);
            if (call_.folds) {
                const bool copies_out = wanted && !target && call_.deliver != Deliver::owner;
                staged = staged || !source || copies_out;
                longest = std::max(longest, call_.chunks[rank].length);
            } else if (!source && !is_small(rank)) {
                staged = true;
                longest = std::max(longest, offered_bytes(rank));
            } else {
                closes = closes || source;
            }
        }
        const int64_t limit = call_.folds ? fold_share() : int64_t(layout_.stage_bytes);
        quantum_ = staged ? limit : std::max<int64_t>(longest, 1);
        pieces_ = std::max<int64_t>(1, (longest + quantum_ - 1) / quantum_);
        staged_ = staged;
        closes_ = call_.folds || closes;
        // In place the lines are in the cache already: to stream them would throw them out.
        bool in_place = false;
        for (const Offer& offer : offers_)
            in_place = in_place || (offer.source == offer.target && offer.flags != 0);
        if (call_.gathers) join();
        // How much all ranks touch: each decides for itself, since only speed depends on it.
        int64_t touched = call_.folds ? int64_t(own_.bytes) : 0;
        for (const Span& pull : call_.pulls) touched += pull.length;
        streams_ = !staged && !(call_.folds && in_place) && touched * size_ >= stream_bytes_;
    }

    // Elements of each rank's chunk that fit in a slot beside those of the others.
    int64_t fold_share() const {
        const int64_t bytes = int64_t(layout_.stage_bytes) / size_ / int64_t(line_bytes);
        return std::max<int64_t>(1, bytes * int64_t(line_bytes) / call_.reduction.itemsize);
    }

    Span part(int owner, int64_t piece, int64_t quantum) const {
        const Span& chunk = call_.chunks[owner];
        const int64_t start = std::min(piece * quantum, chunk.length);
        return {chunk.offset + start, std::min(quantum, chunk.length - start)};
    }

    // A rank's own elements are folded from where they lie; the others find theirs in the slot.
    void copy_in(int64_t piece) {
        if (own_.flags & source_registered) return;
        char* slot = input(rank_);
        if (!call_.folds) {
            const int64_t start = piece * int64_t(layout_.stage_bytes);
            const int64_t left = call_.source_bytes - start;
            if (left > 0)
                std::memcpy(slot, call_.source + start,
                            std::min<int64_t>(left, layout_.stage_bytes));
            return;
        }
        const int64_t share = fold_share(), itemsize = call_.reduction.itemsize;
        for (int owner = 0; owner < size_; ++owner) {
            const Span span = part(owner, piece, share);
            if (owner != rank_ && span.length > 0)
                std::memcpy(slot + owner * share * itemsize, call_.source + span.offset * itemsize,
                            span.length * itemsize);
        }
    }

    // While others still work on this piece, the next one is copied in already.
    void run_piece() {
        if (call_.folds)
            fold_piece();
        else
            pull_piece();
        if (piece_ + 1 >= pieces_) return;
        ++slot_;
        copy_in(piece_ + 1);
        --slot_;
    }

    void fold_piece() {
        const int64_t itemsize = call_.reduction.itemsize;
        const Span span = part(rank_, piece_, quantum_);
        const int64_t at = span.offset * itemsize;
        if (span.length > 0) {
            for (int rank = 0; rank < size_; ++rank) {
                if (rank == rank_)
                    sources_[rank] = call_.source + at;
                else if (has(rank, source_registered))
                    sources_[rank] = ranks_[rank].arena + offers_[rank].source + at;
                else
                    sources_[rank] = input(rank) + rank_ * quantum_ * itemsize;
            }
            choose_targets(at);
            if (!targets_.empty())
                folder_.run(call_.reduction, sources_, targets_, span.length, streams_);
        }
    }

    void choose_targets(int64_t at) {
        targets_.clear();
        if (call_.deliver == Deliver::owner) {
            const int64_t itemsize = call_.reduction.itemsize;
            targets_.push_back(call_.target + piece_ * quantum_ * itemsize);
            return;
        }
        bool leaves = false;
        if (call_.target != nullptr) targets_.push_back(call_.target + at);
        for (int rank = 0; rank < size_; ++rank) {
            if (rank == rank_ || (call_.deliver == Deliver::root && rank != call_.root)) continue;
            if (has(rank, target_registered))
                targets_.push_back(ranks_[rank].arena + offers_[rank].target + at);
            else
                leaves = true;
        }
        if (leaves) targets_.push_back(result(rank_));
    }

    void take_results() {
        const bool wanted = call_.deliver == Deliver::all ||
                            (call_.deliver == Deliver::root && rank_ == call_.root);
        if (!wanted || (own_.flags & target_registered)) return;
        const int64_t itemsize = call_.reduction.itemsize;
        for (int step = 1; step < size_; ++step) {
            const int owner = (rank_ + step) % size_;
            const Span span = part(owner, piece_, quantum_);
            if (span.length > 0)
                std::memcpy(call_.target + span.offset * itemsize, result(owner),
                            span.length * itemsize);
        }
    }

    void join() {
        call_.pulls.clear();
        call_.places.clear();
        int64_t place = 0;
        for (int rank = 0; rank < size_; ++rank) {
            call_.pulls.push_back({0, call_.target == nullptr ? 0 : offered_bytes(rank)});
            call_.places.push_back(place);
            place += offered_bytes(rank);
        }
        if (place != call_.target_bytes)
            for (Span& pull : call_.pulls) pull.length = 0;
    }

    // Overlaps where a part stays in place or moves within its own buffer.
    void copy_own(char* place, const char* from, int64_t bytes) const {
        if (place + bytes <= from || from + bytes <= place)
            copy(place, from, bytes, streams_);
        else
            std::memmove(place, from, bytes);
    }

    // Registered and inline sources are taken whole with the first piece.
    void pull_piece() {
        for (int step = 0; step < size_; ++step) {
            const int from = (rank_ + step) % size_;
            const Span& pull = call_.pulls[from];
            char* place = call_.target + call_.places[from];
            if (pull.length == 0) continue;
            if (from == rank_) {
                if (piece_ == 0) copy_own(place, call_.source + pull.offset, pull.length);
            } else if (is_small(from) || has(from, source_registered)) {
                const char* whole = is_small(from)
                                        ? ranks_[from].control + layout_.small(first_epoch_)
                                        : ranks_[from].arena + offers_[from].source;
                if (piece_ == 0)
                    copy(place, whole + pull.offset, pull.length, streams_);
            } else {
                const int64_t start = piece_ * quantum_;
                const int64_t low = std::max(pull.offset, start);
                const int64_t high = std::min(pull.offset + pull.length, start + quantum_);
                if (low < high)
                    std::memcpy(place + low - pull.offset, input(from) + low - start, high - low);
            }
        }
        store_fence();
    }

    // Arrives at the barrier that follows a piece, where there is one: pieces of a move that only
    // used slots need none at the end, since slots are doubled.
    bool last_barrier() {
        if (!call_.folds && !closes_ && piece_ + 1 >= pieces_) {
            if (staged_) ++slot_;
            return true;
        }
        publish(own_);
        phase_ = Phase::piece;
        return false;
    }

    const std::vector<Neighbour> ranks_;
    const int size_, rank_;
    const uint64_t window_;
    const Layout layout_;
    const int64_t stream_bytes_;
    Barrier barrier_;
    Folder folder_;
    Phase phase_ = Phase::idle;
    Call call_;
    Offer own_{};
    std::vector<Offer> offers_;
    std::vector<const char*> sources_;
    std::vector<char*> targets_;
    bool small_ = false, staged_ = false, closes_ = false, streams_ = false;
    uint64_t calls_ = 0;
    uint32_t first_epoch_ = 0, slot_ = 0;
    int64_t piece_ = 0, pieces_ = 0, quantum_ = 0;
};

}  // namespace shared
}  // namespace distrt
