// Shared memory: folds the same elements of all ranks and stores the result at several places.
//
// Works block by block, so that partial results stay in the first-level cache and every input is
// read, and every result written, once. Inputs are folded in rank order; half types are float32
// from the first fold to the last. Results may lie where inputs lie: a block is stored after it was read.
// May include copy.h.
#pragma once

#include <algorithm>
#include <vector>

#include "copy.h"
#include "variant.h"

namespace distrt {
namespace shared {

// A reduction over elements of one type: the kernels of csrc/host and the sizes they work in.
// The `pair` kernels take the first rank's elements for the partial result.
struct Reduction {
    host::Fold pair_fold = nullptr, fold = nullptr;
    host::Finish pair_finish = nullptr, finish = nullptr;
    int64_t itemsize = 1;
    double divisor = 1;

    // `fold` and `finish`: indices of kernels. Only the halves are not their own accumulators.
    static Reduction make(const host::Variant& variant, int fold, int finish, int64_t itemsize,
                          double divisor) {
        const bool half = fold < host::half_rows;
        const host::Kernel table[] = {half ? variant.pair_folds[fold] : variant.kernels[fold],
                                      variant.kernels[fold],
                                      half ? variant.pair_finishes[fold] : variant.kernels[finish],
                                      variant.kernels[finish]};
        return {reinterpret_cast<host::Fold>(table[0]), reinterpret_cast<host::Fold>(table[1]),
                reinterpret_cast<host::Finish>(table[2]), reinterpret_cast<host::Finish>(table[3]),
                itemsize, divisor};
    }
};

constexpr int64_t block_bytes = 8192;

class Folder {
   public:
    // `sources`: the same `count` elements of each rank, of two at least; `targets`: where the
    // result goes.
    void run(const Reduction& reduction, const std::vector<const char*>& sources,
             const std::vector<char*>& targets, int64_t count, bool streams) {
        const int64_t block = block_bytes / reduction.itemsize;
        for (int64_t start = 0; start < count; start += block) {
            const int64_t length = std::min(block, count - start);
            one(reduction, sources, targets, start, length, streams);
        }
        if (streams) store_fence();
    }

   private:
    void one(const Reduction& reduction, const std::vector<const char*>& sources,
             const std::vector<char*>& targets, int64_t start, int64_t length, bool streams) {
        const int64_t offset = start * reduction.itemsize, bytes = length * reduction.itemsize;
        const void* partial = sources[0] + offset;
        host::Fold fold = reduction.pair_fold;
        host::Finish finish = reduction.pair_finish;
        for (size_t rank = 1; rank + 1 < sources.size(); ++rank) {
            fold(partial_, partial, sources[rank] + offset, length);
            partial = partial_;
            fold = reduction.fold;
            finish = reduction.finish;
        }
        // A streamed block is finished in the cache and leaves it from there.
        char* finished = streams ? reinterpret_cast<char*>(result_) : targets[0] + offset;
        finish(finished, partial, sources.back() + offset, length, reduction.divisor);
        for (size_t i = streams ? 0 : 1; i < targets.size(); ++i)
            copy(targets[i] + offset, finished, bytes, streams);
    }

    // Accumulators are at most twice as wide as elements.
    alignas(64) char partial_[2 * block_bytes];
    alignas(64) char result_[block_bytes];
};

}  // namespace shared
}  // namespace distrt
