// Shared memory: the extension module distrt._shared, called by transport/shared_memory.py and
// collectives/direct.py.
//
// Channel's quick_* methods take arrays straight from the verb and answer None where they are not
// the plain case (the verb then goes the general way, which makes the same call on the channel,
// so ranks may differ in this). They look at NumPy's own structs: no temporaries, no second look.
// Everything that folds, copies or waits runs without the GIL. Links neither MPI nor the kernels,
// whose table distrt._host hands over in a capsule.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#define NPY_TARGET_VERSION NPY_1_23_API_VERSION
#include <numpy/arrayobject.h>
#include <sys/mman.h>

#include <new>

#include "channel.h"

namespace {

using namespace distrt::shared;
namespace host = distrt::host;

constexpr int64_t slice_ns = 100000000;  // a wait comes back to Python this often
constexpr int op_mean = 1, ops = 5;

// What the element types need; filled in by configure() from the dtype table in arrays.py.
struct Row {
    int type = -1, lanes = 1;
    int64_t itemsize = 1;  // of a kernel element; an array element has `lanes` of them
    int fold[ops], finish[ops], widen = -1;
};
std::vector<Row> rows;
host::Kernel const* (*kernels)() = nullptr;
PyObject* op_members[ops] = {};
PyObject* invalid_argument = nullptr;  // distrt.errors.InvalidArgumentError

const Row* row_of(PyArrayObject* array) {
    const int type = PyArray_TYPE(array);
    for (const Row& row : rows)
        if (row.type == type) return &row;
    return nullptr;
}

uint64_t fingerprint(int verb, int op, int row, const npy_intp* shape, int dims, int root) {
    uint64_t digest = mix(verb * 64 + op, row * 4096 + root);
    for (int i = 0; i < dims; ++i) digest = mix(digest, static_cast<uint64_t>(shape[i]));
    return mix(digest, dims);
}

bool set_reduction(Reduction& reduction, const Row& row, int op, double divisor) {
    if (row.fold[op] < 0) return false;
    host::Kernel const* table = kernels();
    reduction.fold = reinterpret_cast<host::Fold>(table[row.fold[op]]);
    reduction.finish = reinterpret_cast<host::Finish>(table[row.finish[op]]);
    reduction.widen =
        row.widen < 0 ? nullptr : reinterpret_cast<host::Widening>(table[row.widen]);
    reduction.itemsize = row.itemsize;
    reduction.divisor = divisor;
    return true;
}

struct ChannelObject {
    PyObject_HEAD
    Channel* channel;
    PyObject* look;     // look(seconds, aborted rank, verb, value), every 100 ms of a quick wait
    int64_t* counter;   // collective calls begun by this rank
    int held;           // not 0: another call, a thread's or a pending one, comes first
    bool busy, given_up;
};

ChannelObject* self_of(PyObject* object) { return reinterpret_cast<ChannelObject*>(object); }

void begin(ChannelObject* self) {
    ++*self->counter;
    self->channel->begin();
}

void give_up(ChannelObject* self) {
    self->given_up = true;
    self->channel->abort();
}

// Runs the begun call to its end. Returns -1 with an exception, else the status.
int run_to_end(ChannelObject* self, int verb, PyObject* value) {
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
        bool fine = PyErr_CheckSignals() == 0;
        if (fine) {
            PyObject* answer =
                PyObject_CallFunction(self->look, "diiO", (now_ns() - started) * 1e-9,
                                      self->channel->aborted(), verb, value);
            fine = answer != nullptr;
            Py_XDECREF(answer);
        }
        if (!fine) {
            self->busy = false;
            give_up(self);
            return -1;
        }
    }
}

bool is_plain(PyObject* object) {
    if (!PyArray_CheckExact(object)) return false;
    auto* array = reinterpret_cast<PyArrayObject*>(object);
    return PyArray_IS_C_CONTIGUOUS(array) && PyArray_ISALIGNED(array) &&
           PyArray_ISNOTSWAPPED(array);
}

char* data_of(PyArrayObject* array) { return PyArray_BYTES(array); }

// Equal or apart: parts of one array must not be both read and written.
bool apart(PyArrayObject* one, PyArrayObject* other) {
    const char *a = data_of(one), *b = data_of(other);
    return a == b || a + PyArray_NBYTES(one) <= b || b + PyArray_NBYTES(other) <= a;
}

// A plain array to be written: of this dtype, dimensions after the first, and length.
bool takes(PyObject* object, PyArrayObject* value, npy_intp length) {
    if (!is_plain(object)) return false;
    auto* out = reinterpret_cast<PyArrayObject*>(object);
    if (!PyArray_ISWRITEABLE(out) || PyArray_TYPE(out) != PyArray_TYPE(value)) return false;
    if (PyArray_NDIM(out) != PyArray_NDIM(value) || !apart(value, out)) return false;
    for (int i = 0; i < PyArray_NDIM(out); ++i)
        if (PyArray_DIM(out, i) != (i == 0 ? length : PyArray_DIM(value, i))) return false;
    return true;
}

int op_of(PyObject* op) {
    for (int i = 0; i < ops; ++i)
        if (op_members[i] == op) return i;
    return -1;
}

// Numbers of the verbs in fingerprints; collectives/direct.py has the same.
enum Verb { verb_all_reduce = 1, verb_reduce_scatter, verb_all_gather, verb_broadcast,
            verb_all_to_all };

PyObject* answer(ChannelObject* self, PyObject* out, Verb verb, PyObject* value) {
    begin(self);
    const int status = run_to_end(self, verb, value);
    if (status == 0) return out;
    Py_DECREF(out);
    if (status < 0) return nullptr;
    Py_RETURN_FALSE;
}

bool ready(ChannelObject* self) { return !(self->held || self->busy || self->given_up); }

PyObject* quick_all_reduce(PyObject* object, PyObject* const* args, Py_ssize_t given) {
    ChannelObject* self = self_of(object);
    if (given != 3 || !ready(self) || !is_plain(args[0])) Py_RETURN_NONE;
    auto* value = reinterpret_cast<PyArrayObject*>(args[0]);
    const int op = op_of(args[1]);
    const Row* row = row_of(value);
    if (op < 0 || row == nullptr || row->fold[op] < 0) Py_RETURN_NONE;
    PyObject* out = args[2];
    const int dims = PyArray_NDIM(value);
    if (out == Py_None) {
        out = PyArray_NewLikeArray(value, NPY_CORDER, nullptr, 0);
        if (out == nullptr) return nullptr;
    } else {
        if (!takes(out, value, dims ? PyArray_DIM(value, 0) : 0)) Py_RETURN_NONE;
        Py_INCREF(out);
    }
    Channel& channel = *self->channel;
    Call& call = channel.prepare();
    set_reduction(call.reduction, *row, op, op == op_mean ? channel.size() : 1);
    call.digest = fingerprint(verb_all_reduce, op, static_cast<int>(row - rows.data()),
                              PyArray_DIMS(value), dims, 0);
    call.source = data_of(value);
    call.target = data_of(reinterpret_cast<PyArrayObject*>(out));
    call.folds = true;
    channel.even_chunks(PyArray_SIZE(value) * row->lanes, row->itemsize);
    return answer(self, out, verb_all_reduce, args[0]);
}

PyObject* quick_reduce_scatter(PyObject* object, PyObject* const* args, Py_ssize_t given) {
    ChannelObject* self = self_of(object);
    if (given != 3 || !ready(self) || !is_plain(args[0])) Py_RETURN_NONE;
    auto* value = reinterpret_cast<PyArrayObject*>(args[0]);
    const int op = op_of(args[1]), dims = PyArray_NDIM(value);
    const Row* row = row_of(value);
    Channel& channel = *self->channel;
    if (op < 0 || row == nullptr || row->fold[op] < 0 || dims == 0) Py_RETURN_NONE;
    const npy_intp length = PyArray_DIM(value, 0) / channel.size();
    if (length * channel.size() != PyArray_DIM(value, 0) || !takes(args[2], value, length) ||
        data_of(value) == data_of(reinterpret_cast<PyArrayObject*>(args[2])))
        Py_RETURN_NONE;
    Call& call = channel.prepare();
    set_reduction(call.reduction, *row, op, op == op_mean ? channel.size() : 1);
    call.digest = fingerprint(verb_reduce_scatter, op, static_cast<int>(row - rows.data()),
                              PyArray_DIMS(value), dims, 0);
    call.source = data_of(value);
    call.target = data_of(reinterpret_cast<PyArrayObject*>(args[2]));
    call.folds = true;
    call.deliver = Deliver::owner;
    const int64_t share = PyArray_SIZE(value) / channel.size() * row->lanes;
    for (int rank = 0; rank < channel.size(); ++rank) call.chunks.push_back({rank * share, share});
    Py_INCREF(args[2]);
    return answer(self, args[2], verb_reduce_scatter, args[0]);
}

// The three moves whose sizes a plain call knows. all_gather leaves out the first dimension.
PyObject* quick_move(PyObject* object, PyObject* const* args, Py_ssize_t given, Verb verb) {
    ChannelObject* self = self_of(object);
    if (given != 3 || !ready(self) || !is_plain(args[0]) || !PyLong_CheckExact(args[1]))
        Py_RETURN_NONE;
    auto* value = reinterpret_cast<PyArrayObject*>(args[0]);
    const int dims = PyArray_NDIM(value);
    const Row* row = row_of(value);
    Channel& channel = *self->channel;
    const long root = PyLong_AsLong(args[1]);
    if (row == nullptr || root < 0 || root >= channel.size() || (dims == 0 && verb != verb_broadcast))
        Py_RETURN_NONE;
    const int64_t bytes = PyArray_NBYTES(value), share = bytes / channel.size();
    const npy_intp rows_in = dims ? PyArray_DIM(value, 0) : 0;
    if (verb == verb_all_to_all && rows_in % channel.size() != 0) Py_RETURN_NONE;
    const npy_intp rows_out = verb == verb_all_gather ? rows_in * channel.size() : rows_in;
    if (!takes(args[2], value, rows_out)) Py_RETURN_NONE;
    char* target = data_of(reinterpret_cast<PyArrayObject*>(args[2]));
    if (verb != verb_broadcast && data_of(value) == target) Py_RETURN_NONE;
    Call& call = channel.prepare();
    const int fixed = verb == verb_all_gather ? 1 : 0;
    call.digest = fingerprint(verb, 0, static_cast<int>(row - rows.data()),
                              PyArray_DIMS(value) + fixed, dims - fixed, static_cast<int>(root));
    call.source = data_of(value);
    call.source_bytes = verb == verb_broadcast && channel.rank() != root ? 0 : bytes;
    if (verb == verb_all_gather) {
        call.gathers = true;
        channel.set_target(target, PyArray_NBYTES(reinterpret_cast<PyArrayObject*>(args[2])));
    } else {
        call.target = target;
        for (int rank = 0; rank < channel.size(); ++rank) {
            if (verb == verb_all_to_all)
                call.pulls.push_back({channel.rank() * share, share});
            else
                call.pulls.push_back({0, rank == root ? bytes : 0});
            call.places.push_back(verb == verb_all_to_all ? rank * share : 0);
        }
    }
    PyObject* out = args[2];
    Py_INCREF(out);
    PyObject* result = answer(self, out, verb, args[0]);
    // Parts of other lengths than this one's: nothing was written, and only this array is wrong.
    int64_t joined = 0;
    if (result == out && verb == verb_all_gather) {
        for (int rank = 0; rank < channel.size(); ++rank) joined += channel.offered_bytes(rank);
        if (joined != call.target_bytes) {
            Py_DECREF(result);
            PyErr_Format(invalid_argument,
                         "all_gather: out has %lld bytes, the ranks' parts have %lld together",
                         static_cast<long long>(call.target_bytes), static_cast<long long>(joined));
            return nullptr;
        }
    }
    return result;
}

PyObject* quick_all_gather(PyObject* object, PyObject* const* args, Py_ssize_t given) {
    return quick_move(object, args, given, verb_all_gather);
}
PyObject* quick_broadcast(PyObject* object, PyObject* const* args, Py_ssize_t given) {
    return quick_move(object, args, given, verb_broadcast);
}
PyObject* quick_all_to_all(PyObject* object, PyObject* const* args, Py_ssize_t given) {
    return quick_move(object, args, given, verb_all_to_all);
}

// fingerprint(verb, op, dtype number, shape, root): what the quick way would say of this call.
PyObject* channel_fingerprint(PyObject*, PyObject* args) {
    int verb, op, type, root;
    PyObject* shape;
    if (!PyArg_ParseTuple(args, "iiiO!i", &verb, &op, &type, &PyTuple_Type, &shape, &root))
        return nullptr;
    int index = 0;
    for (const Row& row : rows)
        if (row.type == type) index = static_cast<int>(&row - rows.data());
    std::vector<npy_intp> dims;
    for (Py_ssize_t i = 0; i < PyTuple_Size(shape); ++i)
        dims.push_back(PyLong_AsSsize_t(PyTuple_GetItem(shape, i)));
    if (PyErr_Occurred()) return nullptr;
    const int count = static_cast<int>(dims.size());
    return PyLong_FromUnsignedLongLong(fingerprint(verb, op, index, dims.data(), count, root));
}

bool idle(ChannelObject* self) {
    if (!self->channel->running()) return true;
    PyErr_SetString(PyExc_RuntimeError, "the channel's last call has not ended");
    return false;
}

// fold(digest, source, target, dtype number, op, count, divisor, chunks | None, deliver, root)
PyObject* channel_fold(PyObject* object, PyObject* args) {
    ChannelObject* self = self_of(object);
    unsigned long long digest, source, target;
    int type, op, deliver, root;
    long long count;
    double divisor;
    PyObject* chunks;
    if (!PyArg_ParseTuple(args, "KKKiiLdOii", &digest, &source, &target, &type, &op, &count,
                          &divisor, &chunks, &deliver, &root) ||
        !idle(self))
        return nullptr;
    Call& call = self->channel->prepare();
    const Row* found = nullptr;
    for (const Row& row : rows)
        if (row.type == type) found = &row;
    if (found == nullptr || op < 0 || op >= ops || !set_reduction(call.reduction, *found, op, divisor)) {
        PyErr_SetString(PyExc_ValueError, "no kernel for this dtype and op");
        return nullptr;
    }
    call.digest = digest;
    call.source = reinterpret_cast<const char*>(source);
    call.target = reinterpret_cast<char*>(target);
    call.folds = true;
    call.deliver = static_cast<Deliver>(deliver);
    call.root = root;
    if (chunks == Py_None) {
        self->channel->even_chunks(count, found->itemsize);
    } else {
        for (int rank = 0; rank < self->channel->size(); ++rank) {
            long long start, length;
            PyObject* span = PySequence_GetItem(chunks, rank);
            const bool fine = span && PyArg_ParseTuple(span, "LL", &start, &length);
            Py_XDECREF(span);
            if (!fine) return nullptr;
            call.chunks.push_back({start, length});
        }
    }
    begin(self);
    Py_RETURN_NONE;
}

// move(digest, source, bytes, target, pulls): pulls of (offset, length, place) for each rank, or
// None to take everything, joined in rank order (then step answers "sized" once).
PyObject* channel_move(PyObject* object, PyObject* args) {
    ChannelObject* self = self_of(object);
    unsigned long long digest, source, target;
    long long bytes;
    PyObject* pulls;
    if (!PyArg_ParseTuple(args, "KKLKO", &digest, &source, &bytes, &target, &pulls) || !idle(self))
        return nullptr;
    Call& call = self->channel->prepare();
    call.digest = digest;
    call.source = reinterpret_cast<const char*>(source);
    call.source_bytes = bytes;
    call.target = reinterpret_cast<char*>(target);
    call.gathers = pulls == Py_None;
    for (int rank = 0; !call.gathers && rank < self->channel->size(); ++rank) {
        long long offset, length, place;
        PyObject* pull = PySequence_GetItem(pulls, rank);
        const bool fine = pull && PyArg_ParseTuple(pull, "LLL", &offset, &length, &place);
        Py_XDECREF(pull);
        if (!fine) return nullptr;
        call.pulls.push_back({offset, length});
        call.places.push_back(place);
    }
    begin(self);
    Py_RETURN_NONE;
}

PyObject* channel_set_target(PyObject* object, PyObject* args) {
    unsigned long long target;
    long long bytes;
    if (!PyArg_ParseTuple(args, "KL", &target, &bytes)) return nullptr;
    self_of(object)->channel->set_target(reinterpret_cast<char*>(target), bytes);
    Py_RETURN_NONE;
}

PyObject* channel_offered(PyObject* object, PyObject*) {
    Channel& channel = *self_of(object)->channel;
    PyObject* list = PyList_New(channel.size());
    for (int rank = 0; list != nullptr && rank < channel.size(); ++rank)
        PyList_SetItem(list, rank, PyLong_FromLongLong(channel.offered_bytes(rank)));
    return list;
}

PyObject* channel_step(PyObject* object, PyObject* seconds) {
    const double budget = PyFloat_AsDouble(seconds);
    if (budget == -1 && PyErr_Occurred()) return nullptr;
    Status status;
    Py_BEGIN_ALLOW_THREADS
    status = self_of(object)->channel->step(static_cast<int64_t>(budget * 1e9));
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(static_cast<long>(status));
}

PyObject* channel_give_up(PyObject* object, PyObject*) {
    give_up(self_of(object));
    Py_RETURN_NONE;
}

PyObject* channel_unsynchronised(PyObject* object, PyObject* value) {
    self_of(object)->channel->unsynchronised = PyObject_IsTrue(value) == 1;
    Py_RETURN_NONE;
}

PyObject* channel_round_trips(PyObject* object, PyObject* rounds) {
    const long count = PyLong_AsLong(rounds);
    if (count == -1 && PyErr_Occurred()) return nullptr;
    double seconds;
    Py_BEGIN_ALLOW_THREADS
    seconds = self_of(object)->channel->round_trips(static_cast<uint32_t>(count));
    Py_END_ALLOW_THREADS
    return PyFloat_FromDouble(seconds);
}

PyObject* get_aborted(PyObject* object, void*) {
    return PyLong_FromLong(self_of(object)->channel->aborted());
}
PyObject* get_busy(PyObject* object, void*) {
    return PyBool_FromLong(self_of(object)->busy);
}
PyObject* get_given_up(PyObject* object, void*) {
    return PyBool_FromLong(self_of(object)->given_up);
}
PyObject* get_held(PyObject* object, void*) { return PyLong_FromLong(self_of(object)->held); }
int set_held(PyObject* object, PyObject* value, void*) {
    const long held = PyLong_AsLong(value);
    if (held == -1 && PyErr_Occurred()) return -1;
    self_of(object)->held = static_cast<int>(held);
    return 0;
}

int channel_init(PyObject* object, PyObject* args, PyObject* keywords) {
    static const char* names[] = {"arenas", "controls", "rank",   "window",  "inline_bytes",
                                  "stage_bytes", "stream_bytes", "spins", "yields", "epoch",
                                  "counter", "look", nullptr};
    ChannelObject* self = self_of(object);
    PyObject *arenas, *controls, *look;
    unsigned long long window, counter;
    unsigned int epoch;
    int rank;
    long long stream_bytes;
    Layout layout;
    Patience patience;
    unsigned long long inline_bytes, stage_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOiKKKLiiIKO", const_cast<char**>(names),
                                     &arenas, &controls, &rank, &window, &inline_bytes,
                                     &stage_bytes, &stream_bytes, &patience.spins,
                                     &patience.yields, &epoch, &counter, &look))
        return -1;
    layout.inline_bytes = inline_bytes;
    layout.stage_bytes = stage_bytes;
    std::vector<Neighbour> ranks;
    for (Py_ssize_t i = 0; i < PySequence_Size(arenas); ++i) {
        PyObject* arena = PySequence_GetItem(arenas, i);
        PyObject* control = PySequence_GetItem(controls, i);
        ranks.push_back({static_cast<char*>(arena ? PyLong_AsVoidPtr(arena) : nullptr),
                         static_cast<char*>(control ? PyLong_AsVoidPtr(control) : nullptr)});
        Py_XDECREF(arena);
        Py_XDECREF(control);
    }
    if (PyErr_Occurred()) return -1;
    self->look = Py_NewRef(look);
    self->counter = reinterpret_cast<int64_t*>(counter);
    self->channel = new Channel(std::move(ranks), rank, window, layout, patience, stream_bytes, epoch);
    return 0;
}

void channel_dealloc(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    delete self_of(object)->channel;
    Py_XDECREF(self_of(object)->look);
    type->tp_free(object);
    Py_DECREF(type);
}
int channel_traverse(PyObject* object, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self_of(object)->look);
    return 0;
}
int channel_clear(PyObject* object) {
    Py_CLEAR(self_of(object)->look);
    return 0;
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef channel_methods[] = {
    {"quick_all_reduce", fast(quick_all_reduce), METH_FASTCALL, "(value, op, out | None)"},
    {"quick_reduce_scatter", fast(quick_reduce_scatter), METH_FASTCALL, "(value, op, out)"},
    {"quick_all_gather", fast(quick_all_gather), METH_FASTCALL, "(value, 0, out)"},
    {"quick_broadcast", fast(quick_broadcast), METH_FASTCALL, "(value, root, out)"},
    {"quick_all_to_all", fast(quick_all_to_all), METH_FASTCALL, "(value, 0, out)"},
    {"fingerprint", channel_fingerprint, METH_VARARGS, "(verb, op, dtype, shape, root) -> int"},
    {"fold", channel_fold, METH_VARARGS, "begin a fold"},
    {"move", channel_move, METH_VARARGS, "begin a move"},
    {"set_target", channel_set_target, METH_VARARGS, "(address, bytes) after `sized`"},
    {"offered", channel_offered, METH_NOARGS, "bytes of each rank's source in this move"},
    {"step", channel_step, METH_O, "step(seconds) -> status"},
    {"give_up", channel_give_up, METH_NOARGS, "refuse every later call, and tell the neighbours"},
    {"round_trips", channel_round_trips, METH_O, "round_trips(rounds) -> seconds, on ranks 0 and 1"},
    {"unsynchronised", channel_unsynchronised, METH_O, "the benchmark's limit: wait for nobody"},
    {nullptr, nullptr, 0, nullptr},
};
PyGetSetDef channel_attributes[] = {
    {"aborted", get_aborted, nullptr, "the rank that gave a call up, or -1", nullptr},
    {"busy", get_busy, nullptr, "whether a thread is in a quick call", nullptr},
    {"given_up", get_given_up, nullptr, "whether a call was given up", nullptr},
    {"held", get_held, set_held, "quick calls answer None while this is not 0", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyType_Slot channel_slots[] = {
    {Py_tp_init, reinterpret_cast<void*>(channel_init)},
    {Py_tp_dealloc, reinterpret_cast<void*>(channel_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(channel_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(channel_clear)},
    {Py_tp_methods, channel_methods},
    {Py_tp_getset, channel_attributes},
    {0, nullptr},
};
PyType_Spec channel_spec = {"distrt._shared.Channel", sizeof(ChannelObject), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, channel_slots};

// configure(kernel capsule, op members, rows of (type, lanes, itemsize, folds, finishes, widen),
// InvalidArgumentError)
PyObject* configure(PyObject*, PyObject* args) {
    PyObject *capsule, *members, *table, *error;
    if (!PyArg_ParseTuple(args, "OO!O!O", &capsule, &PyTuple_Type, &members, &PyTuple_Type, &table,
                          &error))
        return nullptr;
    void* pointer = PyCapsule_GetPointer(capsule, "distrt._host.kernels");
    if (pointer == nullptr) return nullptr;
    kernels = reinterpret_cast<host::Kernel const* (*)()>(pointer);
    for (int i = 0; i < ops; ++i) op_members[i] = Py_NewRef(PyTuple_GetItem(members, i));
    invalid_argument = Py_NewRef(error);
    rows.clear();
    for (Py_ssize_t i = 0; i < PyTuple_Size(table); ++i) {
        Row row;
        long long itemsize;
        int* f = row.fold;
        int* g = row.finish;
        if (!PyArg_ParseTuple(PyTuple_GetItem(table, i), "iiL(iiiii)(iiiii)i", &row.type,
                              &row.lanes, &itemsize, f, f + 1, f + 2, f + 3, f + 4, g, g + 1,
                              g + 2, g + 3, g + 4, &row.widen))
            return nullptr;
        row.itemsize = itemsize;
        rows.push_back(row);
    }
    Py_RETURN_NONE;
}

// map(fd, bytes) -> address. The mapping may be longer than the file, which grows into it.
PyObject* map(PyObject*, PyObject* args) {
    int fd;
    unsigned long long bytes;
    if (!PyArg_ParseTuple(args, "iK", &fd, &bytes)) return nullptr;
    void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (address == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
    return PyLong_FromVoidPtr(address);
}

PyObject* unmap(PyObject*, PyObject* args) {
    unsigned long long address, bytes;
    if (!PyArg_ParseTuple(args, "KK", &address, &bytes)) return nullptr;
    munmap(reinterpret_cast<void*>(address), bytes);
    Py_RETURN_NONE;
}

// populate(address, bytes): page tables are filled now, not at the first touch. Only a hint.
PyObject* populate(PyObject*, PyObject* args) {
    unsigned long long address, bytes;
    if (!PyArg_ParseTuple(args, "KK", &address, &bytes)) return nullptr;
#ifdef MADV_POPULATE_WRITE
    Py_BEGIN_ALLOW_THREADS
    madvise(reinterpret_cast<void*>(address), bytes, MADV_POPULATE_WRITE);
    Py_END_ALLOW_THREADS
#endif
    Py_RETURN_NONE;
}

PyObject* control_bytes(PyObject*, PyObject* args) {
    unsigned long long inline_bytes, stage_bytes;
    if (!PyArg_ParseTuple(args, "KK", &inline_bytes, &stage_bytes)) return nullptr;
    return PyLong_FromUnsignedLongLong(Layout{inline_bytes, stage_bytes}.total());
}

PyMethodDef methods[] = {
    {"configure", configure, METH_VARARGS, "configure(kernels, ops, rows, error)"},
    {"map", map, METH_VARARGS, "map(fd, bytes) -> address"},
    {"unmap", unmap, METH_VARARGS, "unmap(address, bytes)"},
    {"populate", populate, METH_VARARGS, "populate(address, bytes)"},
    {"control_bytes", control_bytes, METH_VARARGS, "(inline_bytes, stage_bytes) -> bytes"},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "distrt._shared",
                          "Collectives in shared memory; see distrt/collectives/direct.py.", -1,
                          methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__shared() {
    import_array();
    PyObject* module = PyModule_Create(&definition);
    if (module == nullptr) return nullptr;
    PyObject* type = PyType_FromSpec(&channel_spec);
    if (type == nullptr || PyModule_AddObject(module, "Channel", type) < 0) return nullptr;
    PyModule_AddIntConstant(module, "arena_bytes", sizeof(Arena));
    return module;
}
