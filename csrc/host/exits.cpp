// distrt._exits: what a rank does after its Python interpreter has gone (layer 3, health/exits.py).
//
// glibc's on_exit() hands over the true exit status, which Python tells nobody
// while it still runs: a SystemExit never reaches sys.excepthook. A failing
// status ends the whole job with that code; a clean one waits in the leave
// barrier until every rank is leaving, then finalizes MPI.
//
// The extension links no MPI: Python passes the functions' addresses and the
// handles' values, so that one build serves every MPI.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstdlib>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

// A handle is a 4 byte int in MPICH and a pointer in Open MPI and in MPI's
// standard ABI. As a value it travels in one register either way; as memory
// its low bytes come first (x86-64 and aarch64 are little-endian).
using Handle = std::uint64_t;

using AbortFn = int (*)(Handle, int);
using FinalizeFn = int (*)();
using FinalizedFn = int (*)(int *);
using StartFn = int (*)(Handle *);
using TestFn = int (*)(Handle *, int *, void *);
using FreeFn = int (*)(Handle *);

constexpr int max_rounds = 32;       // 2^32 ranks
constexpr useconds_t poll_us = 200;  // late ranks need the core more than this one
constexpr int drain_ms = 1000;       // at most, for the launcher to read this rank's output
constexpr int forward_ms = 50;       // then, to pass it on

struct Exits {
    bool armed = false;  // not yet exiting
    bool heard = false;  // Python has received the first round's message already
    bool left = false;   // the leave barrier is complete
    pid_t pid = 0;       // forked children inherit the hook, but are no rank
    AbortFn abort = nullptr;
    FinalizeFn finalize = nullptr;
    FinalizedFn finalized = nullptr;
    StartFn start = nullptr;
    TestFn test = nullptr;
    FreeFn free = nullptr;
    Handle world = 0;
    int rounds = 0;  // 0: a world of one rank
    Handle send[max_rounds] = {};
    Handle receive[max_rounds] = {};
};

Exits exits;

// What the first round's message says: how many calls its sender has made. Static,
// because it is sent and received after Python's memory has gone.
std::int64_t own_calls = 0, previous_calls = 0;

// Tells, once, whether MPI is this hook's to end. MPI_Abort calls exit() itself,
// in the rank that calls it and, in MPICH, inside whatever MPI call the other
// ranks are in; exit() must not lead back into MPI there.
bool take_over() {
    int finalized = 1;
    bool ours = exits.armed && exits.pid == getpid();
    exits.armed = false;
    return ours && exits.finalized(&finalized) == 0 && !finalized;
}

bool complete(Handle *request) {
    // MPI_STATUS_IGNORE differs between MPIs: a status nobody reads fits all.
    alignas(16) unsigned char status[256];
    int done = 0;
    while (exits.test(request, &done, status) == 0) {
        if (done) return true;
        usleep(poll_us);  // gives up the core, as sched_yield() would
    }
    return false;
}

// Dissemination barrier over the prepared requests: in round k this rank sends
// to rank + 2^k and hears from rank - 2^k. The first round's message is what
// exits.departed() sees in a rank that still waits for this one.
bool leave() {
    for (int k = 0; !exits.left && k < exits.rounds; ++k) {
        Handle *send = &exits.send[k], *receive = &exits.receive[k];
        bool heard = k == 0 && exits.heard;
        if ((!heard && exits.start(receive) != 0) || exits.start(send) != 0) return false;
        if (!complete(send) || (!heard && !complete(receive))) return false;
        exits.free(send);
        exits.free(receive);
    }
    exits.left = true;
    return true;
}

bool unread(int descriptor) {
    struct stat info;
    int bytes = 0;
    return fstat(descriptor, &info) == 0 && S_ISFIFO(info.st_mode) &&
           ioctl(descriptor, FIONREAD, &bytes) == 0 && bytes > 0;
}

// hydra ends the job as soon as it hears of the abort, without reading what the
// ranks have still in their pipes: the traceback has to be on its way first.
void end_job(int code) {
    for (int ms = 0; ms < drain_ms && (unread(1) || unread(2)); ++ms) usleep(1000);
    usleep(1000 * forward_ms);
    exits.abort(exits.world, code);
}

void on_status(int status, void *) {
    // A living interpreter: not Python's own exit, but exit() inside some library.
    if (Py_IsInitialized() || !take_over()) return;
    int code = status & 0xff;  // what a shell would see
    if (exits.rounds > 0) {
        if (code == 0 && !leave()) code = 1;
        if (code != 0) end_job(code);
    }
    exits.finalize();
}

// Where mpi4py itself finalizes MPI (Py_AtExit, last in first out), this runs
// just before it: too early to know the status, but in time to tell the peers.
void before_mpi4py() {
    if (exits.rounds == 0 || !take_over()) return;
    leave();
    exits.armed = true;
}

Handle handle_of(PyObject *value) {
    return static_cast<Handle>(PyLong_AsUnsignedLongLongMask(value));
}

bool read_handles(PyObject *sequence, Handle *target, int *count) {
    Py_ssize_t n = PySequence_Size(sequence);
    if (n < 0) return false;
    if (n > max_rounds) {
        PyErr_Format(PyExc_ValueError, "expected at most %d rounds, got %zd", max_rounds, n);
        return false;
    }
    for (Py_ssize_t i = 0; i < n; ++i) {
        PyObject *item = PySequence_GetItem(sequence, i);
        if (item == nullptr) return false;
        target[i] = handle_of(item);
        Py_DECREF(item);
        if (PyErr_Occurred()) return false;
    }
    *count = static_cast<int>(n);
    return true;
}

PyObject *arm(PyObject *, PyObject *args) {
    unsigned long long abort, finalize, finalized, start, test, free;
    PyObject *world, *sends, *receives;
    int mpi4py_finalizes;
    if (!PyArg_ParseTuple(args, "(KKKKKK)OOOp", &abort, &finalize, &finalized, &start, &test, &free,
                          &world, &sends, &receives, &mpi4py_finalizes))
        return nullptr;
    if (exits.pid != 0) {
        PyErr_SetString(PyExc_RuntimeError, "the exit hook is installed already");
        return nullptr;
    }
    Exits next;
    int count = 0;
    next.world = handle_of(world);
    if (PyErr_Occurred() || !read_handles(sends, next.send, &next.rounds) ||
        !read_handles(receives, next.receive, &count))
        return nullptr;
    if (count != next.rounds) {
        PyErr_SetString(PyExc_ValueError, "expected as many receives as sends");
        return nullptr;
    }
    next.abort = reinterpret_cast<AbortFn>(abort);
    next.finalize = reinterpret_cast<FinalizeFn>(finalize);
    next.finalized = reinterpret_cast<FinalizedFn>(finalized);
    next.start = reinterpret_cast<StartFn>(start);
    next.test = reinterpret_cast<TestFn>(test);
    next.free = reinterpret_cast<FreeFn>(free);
    next.pid = getpid();
    if (on_exit(on_status, nullptr) != 0 || (mpi4py_finalizes && Py_AtExit(before_mpi4py) != 0)) {
        PyErr_SetString(PyExc_RuntimeError, "no room for another exit hook in this process");
        return nullptr;
    }
    next.armed = true;
    exits = next;
    Py_RETURN_NONE;
}

PyObject *abort_job(PyObject *, PyObject *code) {
    long value = PyLong_AsLong(code);
    if (PyErr_Occurred()) return nullptr;
    if (take_over()) end_job(static_cast<int>(value));
    Py_RETURN_NONE;
}

PyObject *calls(PyObject *, PyObject *) {
    return Py_BuildValue("KK", reinterpret_cast<unsigned long long>(&own_calls),
                         reinterpret_cast<unsigned long long>(&previous_calls));
}

PyObject *heard(PyObject *, PyObject *) {
    exits.heard = true;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"arm", arm, METH_VARARGS,
     "arm(functions, world, sends, receives, mpi4py_finalizes)\n--\n\n"
     "Register the exit hook, once. functions: addresses of MPI_Abort, MPI_Finalize,\n"
     "MPI_Finalized, MPI_Start, MPI_Test and MPI_Request_free; world, sends, receives:\n"
     "values of MPI handles, one persistent send and receive a round."},
    {"calls", calls, METH_NOARGS,
     "calls()\n--\n\nReturn the addresses of two int64: the calls that this rank and the\n"
     "one before it have made; buffers of the first round's send and receive."},
    {"heard", heard, METH_NOARGS,
     "heard()\n--\n\nSay that the first round's message has been received."},
    {"abort", abort_job, METH_O, "abort(code)\n--\n\nEnd the job with MPI_Abort(code)."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "distrt._exits", "What a rank does after its interpreter has gone.",
    -1, methods, nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__exits() { return PyModule_Create(&module); }
