// Shared memory: what the two halves of the extension module distrt._shared have in common.
//
// quick.cpp takes a verb's arrays as they come; module.cpp takes addresses, and holds the rest of
// the module. Both begin calls on one Channel. May include channel.h and Python.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "channel.h"

namespace distrt {
namespace shared {

constexpr int ops = 5, op_mean = 1;

// What an element type needs; filled in by configure() from the dtype table in arrays.py.
struct Row {
    int type = -1, lanes = 1;
    int64_t itemsize = 1;  // of a kernel element; an array element has `lanes` of them
    int fold[ops], finish[ops];  // kernels by their index in distrt._host, or -1
};

struct Tables {
    std::vector<Row> rows;
    const host::Variant& (*active)() = nullptr;
    PyObject* op_members[ops] = {};         // distrt.reduce_op.ReduceOp's, in this order
    PyObject* invalid_argument = nullptr;   // distrt.errors.InvalidArgumentError

    // The row of NumPy's type number, or null.
    const Row* row(int type) const {
        for (const Row& row : rows)
            if (row.type == type) return &row;
        return nullptr;
    }
    // A type's place in the table: equal on all ranks, as the numbers of added types need not be.
    int place(const Row& row) const { return static_cast<int>(&row - rows.data()); }
    Reduction reduction(const Row& row, int op, double divisor) const {
        return Reduction::make(active(), row.fold[op], row.finish[op], row.itemsize, divisor);
    }
};
extern Tables tables;

struct ChannelObject {
    PyObject_HEAD
    Channel* channel;
    PyObject* look;    // look(seconds, aborted rank, verb, value), every 100 ms of a quick wait
    int64_t* counter;  // collective calls begun by this rank
    int held;          // not 0: another call, a thread's or a pending one, comes first
    bool busy, given_up;
};

inline ChannelObject* self_of(PyObject* object) { return reinterpret_cast<ChannelObject*>(object); }

inline void begin(ChannelObject* self) {
    ++*self->counter;
    self->channel->begin();
}

inline void give_up(ChannelObject* self) {
    self->given_up = true;
    self->channel->abort();
}

// What a call with one plain array is; equal where all ranks make the same call.
inline uint64_t fingerprint(int verb, int op, int place, const int64_t* shape, int dims, int root) {
    uint64_t digest = mix(mix(mix(mix(0, verb), op), place), root);
    for (int i = 0; i < dims; ++i) digest = mix(digest, static_cast<uint64_t>(shape[i]));
    return mix(digest, dims);
}

// quick.cpp: makes NumPy's C interface ready; false with an exception.
bool import_numpy();
extern PyMethodDef const quick_methods[];
constexpr int quick_method_count = 5;

}  // namespace shared
}  // namespace distrt
