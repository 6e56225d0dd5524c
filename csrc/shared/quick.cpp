// Shared memory: the quick way, Channel's quick_* methods.
//
// They take arrays straight from the verb and answer None where they are not the plain case; the
// verb then goes the general way, which makes the same call on the channel, so ranks may differ
// in this. What is plain therefore only decides who does the checks. They look at NumPy's own
// structs: no temporaries, no second look. All that folds, copies or waits runs without the GIL.
#include "object.h"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#define NPY_TARGET_VERSION NPY_1_23_API_VERSION
#include <numpy/arrayobject.h>

namespace distrt {
namespace shared {

static_assert(sizeof(npy_intp) == sizeof(int64_t), "64 bits");

namespace {

constexpr int64_t slice_ns = 100000000;  // a wait comes back to Python this often

// Numbers of the verbs in fingerprints; collectives/direct.py has the same.
enum Verb { all_reduce = 1, reduce_scatter, all_gather, broadcast, all_to_all };

// Runs the begun call to its end. Returns -1 with an exception, else the status.
int run_to_end(ChannelObject* self, Verb verb, PyObject* value) {
    const int64_t started = now_ns();
    self->busy = true;
    for (;;) {
        Status status;
        Py_BEGIN_ALLOW_THREADS
        status = self->channel->step(slice_ns);
        Py_END_ALLOW_THREADS
        if (status == Status::done || status == Status::mismatch) {
            self->busy = false;
            return static_cast<int>(status);
        }
        PyObject* seen = nullptr;
        if (PyErr_CheckSignals() == 0)
            seen = PyObject_CallFunction(self->look, "diiO", (now_ns() - started) * 1e-9,
                                         self->channel->aborted(), int{verb}, value);
        if (seen == nullptr) {
            self->busy = false;
            give_up(self);
            --*self->counter;  // a call given up is not made: a rank that leaves now is missed
            return -1;
        }
        Py_DECREF(seen);
    }
}

// Begins the prepared call and returns `out`, a new reference to what the verb returns; False
// where the ranks' calls differ.
PyObject* answer(ChannelObject* self, PyObject* out, Verb verb, PyArrayObject* value) {
    begin(self);
    const int status = run_to_end(self, verb, reinterpret_cast<PyObject*>(value));
    if (status == static_cast<int>(Status::done)) return out;
    Py_DECREF(out);
    if (status < 0) return nullptr;
    Py_RETURN_FALSE;
}

PyArrayObject* array_of(PyObject* object) { return reinterpret_cast<PyArrayObject*>(object); }
char* data_of(PyObject* object) { return PyArray_BYTES(array_of(object)); }

bool is_plain(PyObject* object) {
    if (!PyArray_CheckExact(object)) return false;
    PyArrayObject* array = array_of(object);
    return PyArray_IS_C_CONTIGUOUS(array) && PyArray_ISALIGNED(array) &&
           PyArray_ISNOTSWAPPED(array);
}

// Equal or apart: parts of one array must not be both read and written.
bool apart(PyArrayObject* one, PyArrayObject* other) {
    const char *a = PyArray_BYTES(one), *b = PyArray_BYTES(other);
    return a == b || a + PyArray_NBYTES(one) <= b || b + PyArray_NBYTES(other) <= a;
}

// A plain array to be written: of this dtype, dimensions after the first, and length.
bool takes(PyObject* object, PyArrayObject* value, npy_intp length) {
    if (!is_plain(object)) return false;
    PyArrayObject* out = array_of(object);
    if (!PyArray_ISWRITEABLE(out) || PyArray_TYPE(out) != PyArray_TYPE(value)) return false;
    if (PyArray_NDIM(out) != PyArray_NDIM(value) || !apart(value, out)) return false;
    for (int i = 0; i < PyArray_NDIM(out); ++i)
        if (PyArray_DIM(out, i) != (i == 0 ? length : PyArray_DIM(value, i))) return false;
    return true;
}

npy_intp length_of(PyArrayObject* array) {
    return PyArray_NDIM(array) ? PyArray_DIM(array, 0) : 0;
}

int op_of(PyObject* op) {
    for (int i = 0; i < ops; ++i)
        if (tables.op_members[i] == op) return i;
    return -1;
}

// The array of a call that can be quick, and its row; null where it cannot.
PyArrayObject* value_of(ChannelObject* self, PyObject* const* args, Py_ssize_t given,
                        const Row** row) {
    if (given != 3 || self->held || self->busy || self->given_up || !is_plain(args[0]))
        return nullptr;
    *row = tables.row(PyArray_TYPE(array_of(args[0])));
    return *row == nullptr ? nullptr : array_of(args[0]);
}

// Fills in a fold's call, but for its chunks.
Call& prepare_fold(Channel& channel, Verb verb, int op, const Row& row, PyArrayObject* value,
                   PyObject* out) {
    Call& call = channel.prepare();
    call.reduction = tables.reduction(row, op, op == op_mean ? channel.size() : 1);
    call.digest = fingerprint(verb, op, tables.place(row), PyArray_DIMS(value), PyArray_NDIM(value), 0);
    call.source = PyArray_BYTES(value);
    call.target = data_of(out);
    call.folds = true;
    return call;
}

PyObject* quick_all_reduce(PyObject* object, PyObject* const* args, Py_ssize_t given) {
    ChannelObject* self = self_of(object);
    const Row* row;
    PyArrayObject* value = value_of(self, args, given, &row);
    const int op = value == nullptr ? -1 : op_of(args[1]);
    if (op < 0 || row->fold[op] < 0) Py_RETURN_NONE;
    PyObject* out = args[2];
    if (out == Py_None) {
        out = PyArray_NewLikeArray(value, NPY_CORDER, nullptr, 0);
        if (out == nullptr) return nullptr;
    } else {
        if (!takes(out, value, length_of(value))) Py_RETURN_NONE;
        Py_INCREF(out);
    }
    prepare_fold(*self->channel, all_reduce, op, *row, value, out);
    self->channel->even_chunks(PyArray_SIZE(value) * row->lanes, row->itemsize);
    return answer(self, out, all_reduce, value);
}

PyObject* quick_reduce_scatter(PyObject* object, PyObject* const* args, Py_ssize_t given) {
    ChannelObject* self = self_of(object);
    const Row* row;
    PyArrayObject* value = value_of(self, args, given, &row);
    const int op = value == nullptr ? -1 : op_of(args[1]), size = self->channel->size();
    if (op < 0 || row->fold[op] < 0 || PyArray_NDIM(value) == 0) Py_RETURN_NONE;
    PyObject* out = args[2];
    if (length_of(value) % size != 0 || !takes(out, value, length_of(value) / size) ||
        data_of(out) == PyArray_BYTES(value))
        Py_RETURN_NONE;
    Call& call = prepare_fold(*self->channel, reduce_scatter, op, *row, value, out);
    call.deliver = Deliver::owner;
    const int64_t share = PyArray_SIZE(value) / size * row->lanes;
    for (int rank = 0; rank < size; ++rank) call.chunks.push_back({rank * share, share});
    return answer(self, Py_NewRef(out), reduce_scatter, value);
}

// Whether all that the ranks' parts hold fits into `out`; false with an exception. Where it does
// not, nothing was written, and only this rank's array is wrong.
bool joined(const Channel& channel, int64_t bytes) {
    int64_t parts = 0;
    for (int rank = 0; rank < channel.size(); ++rank) parts += channel.offered_bytes(rank);
    if (parts == bytes) return true;
    PyErr_Format(tables.invalid_argument,
                 "all_gather: out has %lld bytes, the ranks' parts have %lld together",
                 static_cast<long long>(bytes), static_cast<long long>(parts));
    return false;
}

// The fingerprint leaves out the first dimension, which may differ; so rows without bytes, whose
// number nobody could tell, are not for the quick way.
PyObject* quick_all_gather(PyObject* object, PyObject* const* args, Py_ssize_t given) {
    ChannelObject* self = self_of(object);
    const Row* row;
    PyArrayObject* value = value_of(self, args, given, &row);
    if (value == nullptr || PyArray_NDIM(value) == 0) Py_RETURN_NONE;
    for (int i = 1; i < PyArray_NDIM(value); ++i)
        if (PyArray_DIM(value, i) == 0) Py_RETURN_NONE;
    PyObject* out = args[2];
    Channel& channel = *self->channel;
    if (!takes(out, value, length_of(value) * channel.size()) ||
        data_of(out) == PyArray_BYTES(value))
        Py_RETURN_NONE;
    const int64_t bytes = PyArray_NBYTES(array_of(out));
    Call& call = channel.prepare();
    call.digest = fingerprint(all_gather, 0, tables.place(*row), PyArray_DIMS(value) + 1,
                              PyArray_NDIM(value) - 1, 0);
    call.source = PyArray_BYTES(value);
    call.source_bytes = PyArray_NBYTES(value);
    call.gathers = true;
    channel.set_target(data_of(out), bytes);
    PyObject* result = answer(self, Py_NewRef(out), all_gather, value);
    if (result == out && !joined(channel, bytes)) Py_CLEAR(result);
    return result;
}

// The moves whose result is as long as the value. `args[1]` is the root, or 0.
PyObject* quick_move(PyObject* object, PyObject* const* args, Py_ssize_t given, Verb verb) {
    ChannelObject* self = self_of(object);
    const Row* row;
    PyArrayObject* value = value_of(self, args, given, &row);
    if (value == nullptr || !PyLong_CheckExact(args[1])) Py_RETURN_NONE;
    Channel& channel = *self->channel;
    int overflow = 0;
    const long root = PyLong_AsLongAndOverflow(args[1], &overflow);
    PyObject* out = args[2];
    if (overflow || root < 0 || root >= channel.size() || !takes(out, value, length_of(value)))
        Py_RETURN_NONE;
    const bool exchanges = verb == all_to_all;
    if (exchanges && (PyArray_NDIM(value) == 0 || length_of(value) % channel.size() != 0 ||
                      data_of(out) == PyArray_BYTES(value)))
        Py_RETURN_NONE;
    const int64_t bytes = PyArray_NBYTES(value), share = bytes / channel.size();
    Call& call = channel.prepare();
    call.digest = fingerprint(verb, 0, tables.place(*row), PyArray_DIMS(value), PyArray_NDIM(value),
                              static_cast<int>(root));
    call.source = PyArray_BYTES(value);
    call.source_bytes = exchanges || channel.rank() == root ? bytes : 0;
    call.target = data_of(out);
    for (int rank = 0; rank < channel.size(); ++rank) {
        const Span whole{0, rank == root ? bytes : 0}, mine{channel.rank() * share, share};
        call.pulls.push_back(exchanges ? mine : whole);
        call.places.push_back(exchanges ? rank * share : 0);
    }
    return answer(self, Py_NewRef(out), verb, value);
}

PyObject* quick_broadcast(PyObject* object, PyObject* const* args, Py_ssize_t given) {
    return quick_move(object, args, given, broadcast);
}
PyObject* quick_all_to_all(PyObject* object, PyObject* const* args, Py_ssize_t given) {
    return quick_move(object, args, given, all_to_all);
}

// METH_FASTCALL functions have a type of their own; CPython casts them back by the flag.
PyMethodDef fast(const char* name, _PyCFunctionFast function, const char* doc) {
    const auto any = reinterpret_cast<void (*)()>(function);
    return {name, reinterpret_cast<PyCFunction>(any), METH_FASTCALL, doc};
}

}  // namespace

PyMethodDef const quick_methods[quick_method_count] = {
    fast("quick_all_reduce", quick_all_reduce, "(value, op, out | None)"),
    fast("quick_reduce_scatter", quick_reduce_scatter, "(value, op, out)"),
    fast("quick_all_gather", quick_all_gather, "(value, 0, out)"),
    fast("quick_broadcast", quick_broadcast, "(value, root, out)"),
    fast("quick_all_to_all", quick_all_to_all, "(value, 0, out)"),
};

bool import_numpy() { return _import_array() == 0; }

}  // namespace shared
}  // namespace distrt
