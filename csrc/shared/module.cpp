// Shared memory: the extension module distrt._shared, called by transport/shared_memory.py and
// collectives/direct.py: memory to map, and the Channel type.
//
// Here arrays come as addresses, from the general way of a verb; quick.cpp takes them as they are.
// Links neither MPI nor the kernels, whose table distrt._host hands over in a capsule.
#include "object.h"

#include <sys/mman.h>

namespace distrt {
namespace shared {
Tables tables;
}
}  // namespace distrt

namespace {

using namespace distrt::shared;
namespace host = distrt::host;

// fingerprint(verb, op, dtype number, shape, root): what the quick way would say of this call.
PyObject* channel_fingerprint(PyObject*, PyObject* args) {
    int verb, op, type, root;
    PyObject* shape;
    if (!PyArg_ParseTuple(args, "iiiO!i", &verb, &op, &type, &PyTuple_Type, &shape, &root))
        return nullptr;
    std::vector<int64_t> dims;
    for (Py_ssize_t i = 0; i < PyTuple_Size(shape); ++i)
        dims.push_back(PyLong_AsLongLong(PyTuple_GetItem(shape, i)));
    if (PyErr_Occurred()) return nullptr;
    const Row* row = tables.row(type);
    if (row == nullptr) {
        PyErr_SetString(PyExc_ValueError, "no row for this dtype");
        return nullptr;
    }
    const int count = static_cast<int>(dims.size());
    return PyLong_FromUnsignedLongLong(
        fingerprint(verb, op, tables.place(*row), dims.data(), count, root));
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
    const Row* row = tables.row(type);
    if (row == nullptr || op < 0 || op >= ops || row->fold[op] < 0) {
        PyErr_SetString(PyExc_ValueError, "no kernel for this dtype and op");
        return nullptr;
    }
    call.reduction = tables.reduction(*row, op, divisor);
    call.digest = digest;
    call.source = reinterpret_cast<const char*>(source);
    call.target = reinterpret_cast<char*>(target);
    call.folds = true;
    call.deliver = static_cast<Deliver>(deliver);
    call.root = root;
    if (chunks == Py_None) {
        self->channel->even_chunks(count, row->itemsize);
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
                                  "stage_bytes", "stream_bytes", "spins", "yields",
                                  "counter", "look", nullptr};
    ChannelObject* self = self_of(object);
    PyObject *arenas, *controls, *look;
    unsigned long long window, counter;
    int rank;
    long long stream_bytes;
    Layout layout;
    Patience patience;
    unsigned long long inline_bytes, stage_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOiKKKLiiKO", const_cast<char**>(names),
                                     &arenas, &controls, &rank, &window, &inline_bytes,
                                     &stage_bytes, &stream_bytes, &patience.spins,
                                     &patience.yields, &counter, &look))
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
    self->channel = new Channel(std::move(ranks), rank, window, layout, patience, stream_bytes, 0);
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

PyMethodDef general_methods[] = {
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
    {Py_tp_methods, nullptr},  // set by PyInit__shared, which joins the two halves
    {Py_tp_getset, channel_attributes},
    {0, nullptr},
};
PyType_Spec channel_spec = {"distrt._shared.Channel", sizeof(ChannelObject), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, channel_slots};

// configure(kernel capsule, op members, rows of (type, lanes, itemsize, folds, finishes),
// InvalidArgumentError)
PyObject* configure(PyObject*, PyObject* args) {
    PyObject *capsule, *members, *table, *error;
    if (!PyArg_ParseTuple(args, "OO!O!O", &capsule, &PyTuple_Type, &members, &PyTuple_Type, &table,
                          &error))
        return nullptr;
    void* pointer = PyCapsule_GetPointer(capsule, "distrt._host.kernels");
    if (pointer == nullptr) return nullptr;
    tables.active = reinterpret_cast<const host::Variant& (*)()>(pointer);
    for (int i = 0; i < ops; ++i) tables.op_members[i] = Py_NewRef(PyTuple_GetItem(members, i));
    tables.invalid_argument = Py_NewRef(error);
    tables.rows.clear();
    for (Py_ssize_t i = 0; i < PyTuple_Size(table); ++i) {
        Row row;
        long long itemsize;
        int* f = row.fold;
        int* g = row.finish;
        if (!PyArg_ParseTuple(PyTuple_GetItem(table, i), "iiL(iiiii)(iiiii)", &row.type,
                              &row.lanes, &itemsize, f, f + 1, f + 2, f + 3, f + 4, g, g + 1,
                              g + 2, g + 3, g + 4))
            return nullptr;
        row.itemsize = itemsize;
        tables.rows.push_back(row);
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
    if (!import_numpy()) return nullptr;
    PyObject* module = PyModule_Create(&definition);
    if (module == nullptr) return nullptr;
    static std::vector<PyMethodDef> all(quick_methods, quick_methods + quick_method_count);
    for (const PyMethodDef& method : general_methods) all.push_back(method);
    for (PyType_Slot& slot : channel_slots)
        if (slot.slot == Py_tp_methods) slot.pfunc = all.data();
    PyObject* type = PyType_FromSpec(&channel_spec);
    if (type == nullptr || PyModule_AddObject(module, "Channel", type) < 0) return nullptr;
    PyModule_AddIntConstant(module, "arena_bytes", sizeof(Arena));
    return module;
}
