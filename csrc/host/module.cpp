// Kernels, host build: the extension module distrt._host, called by distrt/kernels/host.py.
//
// Arrays are passed as integer addresses. The caller has checked dtypes, sizes and lifetimes;
// here only the number and the types of the arguments and the kernel's index are checked. Counts
// from `gil_threshold` on run without the GIL; for smaller ones giving it up costs more than the
// kernel.
#include <Python.h>

#include "variant.h"

namespace {

using distrt::host::Kernel;
namespace host = distrt::host;
namespace index = distrt::host::index;

long long gil_threshold = 32768;

// Reads the arguments of one call in order. The first failure leaves a Python error behind and
// makes the rest return zeros.
class Arguments {
   public:
    Arguments(const char* verb, PyObject* const* args, Py_ssize_t given, Py_ssize_t expected)
        : next_(args) {
        if (given == expected) return;
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", verb, expected, given);
        ok_ = false;
    }

    bool ok() const { return ok_; }

    long long integer() {
        if (!ok_) return 0;
        const long long value = PyLong_AsLongLong(*next_++);
        if (value == -1 && PyErr_Occurred()) ok_ = false;
        return value;
    }

    void* address() {
        if (!ok_) return nullptr;
        void* value = PyLong_AsVoidPtr(*next_++);
        if (value == nullptr && PyErr_Occurred()) ok_ = false;
        return value;
    }

    double real() {
        if (!ok_) return 0;
        const double value = PyFloat_AsDouble(*next_++);
        if (value == -1 && PyErr_Occurred()) ok_ = false;
        return value;
    }

    // The kernel whose index comes next; it must be one of [begin, end).
    Kernel kernel(int begin, int end) {
        const long long at = integer();
        if (!ok_) return nullptr;
        if (at >= begin && at < end) return host::active().kernels[at];
        PyErr_Format(PyExc_IndexError, "kernel index %lld is not of this verb: expected %d to %d",
                     at, begin, end - 1);
        ok_ = false;
        return nullptr;
    }

   private:
    PyObject* const* next_;
    bool ok_ = true;
};

template <class Signature, class... A>
PyObject* run(Kernel kernel, long long count, A... arguments) {
    const auto function = reinterpret_cast<Signature>(kernel);
    if (count < gil_threshold) {
        function(arguments...);
    } else {
        PyThreadState* state = PyEval_SaveThread();
        function(arguments...);
        PyEval_RestoreThread(state);
    }
    Py_RETURN_NONE;
}

PyObject* fold(PyObject*, PyObject* const* args, Py_ssize_t given) {
    Arguments from("fold", args, given, 5);
    const Kernel kernel = from.kernel(index::fold_sum_f16, index::finish_sum_f16);
    void* out = from.address();
    void* partial = from.address();
    void* local = from.address();
    const long long count = from.integer();
    if (!from.ok()) return nullptr;
    return run<host::Fold>(kernel, count, out, partial, local, count);
}

PyObject* finish(PyObject*, PyObject* const* args, Py_ssize_t given) {
    Arguments from("finish", args, given, 6);
    const Kernel kernel = from.kernel(index::finish_sum_f16, index::widen_f16);
    void* out = from.address();
    void* partial = from.address();
    void* local = from.address();
    const long long count = from.integer();
    const double divisor = from.real();
    if (!from.ok()) return nullptr;
    return run<host::Finish>(kernel, count, out, partial, local, count, divisor);
}

PyObject* widen(PyObject*, PyObject* const* args, Py_ssize_t given) {
    Arguments from("widen", args, given, 4);
    const Kernel kernel = from.kernel(index::widen_f16, index::sgd_f16);
    void* out = from.address();
    void* in = from.address();
    const long long count = from.integer();
    if (!from.ok()) return nullptr;
    return run<host::Widening>(kernel, count, out, in, count);
}

PyObject* sgd(PyObject*, PyObject* const* args, Py_ssize_t given) {
    Arguments from("sgd", args, given, 8);
    const Kernel kernel = from.kernel(index::sgd_f16, index::adam_f16);
    void* param = from.address();
    void* grad = from.address();
    void* velocity = from.address();
    const long long count = from.integer();
    const double lr = from.real();
    const double momentum = from.real();
    const int nesterov = from.integer() != 0;
    if (!from.ok()) return nullptr;
    return run<host::Sgd>(kernel, count, param, grad, velocity, count, lr, momentum, nesterov);
}

PyObject* adam(PyObject*, PyObject* const* args, Py_ssize_t given) {
    Arguments from("adam", args, given, 10);
    const Kernel kernel = from.kernel(index::adam_f16, index::count);
    void* param = from.address();
    void* grad = from.address();
    void* m = from.address();
    void* v = from.address();
    const long long count = from.integer();
    const double alpha = from.real();
    const double beta1 = from.real();
    const double beta2 = from.real();
    const double epsilon = from.real();
    if (!from.ok()) return nullptr;
    return run<host::AdamStep>(kernel, count, param, grad, m, v, count, alpha, beta1, beta2,
                               epsilon);
}

PyObject* kernel_names(PyObject*, PyObject*) {
    PyObject* tuple = PyTuple_New(index::count);
    for (int i = 0; tuple != nullptr && i < index::count; ++i) {
        PyObject* name = PyUnicode_FromFormat("distrt_%s", host::names[i]);
        // PyTuple_SetItem takes the reference over, also when it fails.
        if (name == nullptr || PyTuple_SetItem(tuple, i, name) != 0) Py_CLEAR(tuple);
    }
    return tuple;
}

PyObject* isa(PyObject*, PyObject*) { return PyUnicode_FromString(host::active().isa); }

PyObject* isas(PyObject*, PyObject*) {
    int count = 0;
    const host::Variant* const* variants = host::runnable(&count);
    PyObject* tuple = PyTuple_New(count);
    for (int i = 0; tuple != nullptr && i < count; ++i) {
        PyObject* name = PyUnicode_FromString(variants[i]->isa);
        if (name == nullptr || PyTuple_SetItem(tuple, i, name) != 0) Py_CLEAR(tuple);
    }
    return tuple;
}

PyObject* select(PyObject*, PyObject* name) {
    PyObject* bytes = PyUnicode_AsUTF8String(name);
    if (bytes == nullptr) return nullptr;
    const char* text = PyBytes_AsString(bytes);
    const bool known = text != nullptr && host::select(text);
    Py_DECREF(bytes);
    if (known) Py_RETURN_NONE;
    if (text != nullptr) PyErr_Format(PyExc_ValueError, "this processor does not run %R", name);
    return nullptr;
}

PyObject* kernels(PyObject*, PyObject*) {
    return PyCapsule_New(reinterpret_cast<void*>(host::active), "distrt._host.kernels", nullptr);
}

PyObject* set_gil_threshold(PyObject*, PyObject* value) {
    const long long count = PyLong_AsLongLong(value);
    if (count == -1 && PyErr_Occurred()) return nullptr;
    const long long old = gil_threshold;
    gil_threshold = count;
    return PyLong_FromLongLong(old);
}

// METH_FASTCALL functions have a type of their own; CPython casts them back by the flag.
PyMethodDef fast(const char* name, _PyCFunctionFast function, const char* doc) {
    const auto any = reinterpret_cast<void (*)()>(function);
    return {name, reinterpret_cast<PyCFunction>(any), METH_FASTCALL, doc};
}

PyMethodDef methods[] = {
    fast("fold", fold, "fold(index, out, partial, local, count)"),
    fast("finish", finish, "finish(index, out, partial, local, count, divisor)"),
    fast("widen", widen, "widen(index, out, in, count)"),
    fast("sgd", sgd, "sgd(index, param, grad, velocity, count, lr, momentum, nesterov)"),
    fast("adam", adam,
         "adam(index, param, grad, m, v, count, alpha, beta1, beta2, epsilon)"),
    {"names", kernel_names, METH_NOARGS, "names() -> the kernels' exported names, by index"},
    {"kernels", kernels, METH_NOARGS, "kernels() -> capsule: the active kernels, for _shared"},
    {"isa", isa, METH_NOARGS, "isa() -> the instruction set in use"},
    {"isas", isas, METH_NOARGS, "isas() -> the instruction sets that this processor runs"},
    {"select", select, METH_O, "select(isa): use this instruction set from now on"},
    {"set_gil_threshold", set_gil_threshold, METH_O,
     "set_gil_threshold(count) -> old: counts from here on run without the GIL"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "distrt._host",
                          "The host kernels; see distrt/kernels/host.py.",
                          0,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__host() { return PyModuleDef_Init(&definition); }
