// Fails one call to files below some folders, in a process that has this library in LD_PRELOAD.
//
// Calls of C's stdio are covered by `fopen` and `fwrite`, as glibc calls `open` and `write` from within.

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>

namespace {

enum Kind { OPEN, READ, WRITE, FSYNC, LINK, RENAME, MKDIR, UNLINK, KINDS };

char roots[2][4096];                    // the folders; "": none
std::atomic<long> counts[KINDS];        // calls so far
std::atomic<long> struck;               // calls that failed
int faulty_kind = -1, error_number = 0; // which calls fail, and how
long first_faulty = 0;                  // number of the first call that fails
bool is_lasting = false;                // whether later calls fail too
bool tracked[1 << 16];                  // file descriptors of files below the folders

bool is_below(const char *path) {
    for (const char *root : roots)
        if (path && *root && !strncmp(path, root, strlen(root))) return true;
    return false;
}

// Counts a call; returns whether it is to fail, with errno set.
bool fails(Kind kind) {
    long number = counts[kind]++;
    if (kind != faulty_kind || number < first_faulty || (!is_lasting && number > first_faulty)) return false;
    struck++;
    errno = error_number;
    return true;
}

bool is_tracked(int file) { return file >= 0 && file < (1 << 16) && tracked[file]; }

int track(int file, bool below) {
    if (file >= 0 && file < (1 << 16)) tracked[file] = below;
    return file;
}

template <typename Function> Function real(const char *name) { return (Function)dlsym(RTLD_NEXT, name); }

} // namespace

extern "C" {

// Fails call number `at` (from 0) of a kind, and the later ones if `lasting`; kind -1: none. Restarts the counts.
void fault_arm(const char *first, const char *second, int kind, int error, long at, int lasting) {
    strncpy(roots[0], first, sizeof roots[0] - 1);
    strncpy(roots[1], second, sizeof roots[1] - 1);
    for (auto &count : counts) count = 0;
    struck = 0;
    error_number = error;
    first_faulty = at;
    is_lasting = lasting;
    faulty_kind = kind;
}

long fault_count(int kind) { return counts[kind]; }
long fault_struck() { return struck; }

#define OPENER(NAME)                                                                                                   \
    int NAME(const char *path, int flags, ...) {                                                                       \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = va_arg(rest, mode_t);                                                                            \
        va_end(rest);                                                                                                  \
        bool below = is_below(path);                                                                                   \
        if (below && fails(OPEN)) return -1;                                                                           \
        static auto call = real<int (*)(const char *, int, ...)>(#NAME);                                               \
        return track(call(path, flags, mode), below);                                                                  \
    }
OPENER(open)
OPENER(open64)

#define OPENER_AT(NAME)                                                                                                \
    int NAME(int folder, const char *path, int flags, ...) {                                                           \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = va_arg(rest, mode_t);                                                                            \
        va_end(rest);                                                                                                  \
        bool below = is_below(path);                                                                                   \
        if (below && fails(OPEN)) return -1;                                                                           \
        static auto call = real<int (*)(int, const char *, int, ...)>(#NAME);                                          \
        return track(call(folder, path, flags, mode), below);                                                          \
    }
OPENER_AT(openat)
OPENER_AT(openat64)

#define OPENER_OF_STREAM(NAME)                                                                                         \
    FILE *NAME(const char *path, const char *mode) {                                                                   \
        bool below = is_below(path);                                                                                   \
        if (below && fails(OPEN)) return nullptr;                                                                      \
        static auto call = real<FILE *(*)(const char *, const char *)>(#NAME);                                         \
        FILE *file = call(path, mode);                                                                                 \
        if (file) track(fileno(file), below);                                                                          \
        return file;                                                                                                   \
    }
OPENER_OF_STREAM(fopen)
OPENER_OF_STREAM(fopen64)

int close(int file) {
    track(file, false);
    static auto call = real<int (*)(int)>("close");
    return call(file);
}

#define ON_FILE(RESULT, NAME, KIND, PARAMETERS, ARGUMENTS)                                                             \
    RESULT NAME PARAMETERS {                                                                                           \
        if (is_tracked(file) && fails(KIND)) return -1;                                                                \
        static auto call = real<RESULT(*) PARAMETERS>(#NAME);                                                          \
        return call ARGUMENTS;                                                                                         \
    }
ON_FILE(ssize_t, read, READ, (int file, void *data, size_t size), (file, data, size))
ON_FILE(ssize_t, pread, READ, (int file, void *data, size_t size, off_t at), (file, data, size, at))
ON_FILE(ssize_t, pread64, READ, (int file, void *data, size_t size, off64_t at), (file, data, size, at))
ON_FILE(ssize_t, write, WRITE, (int file, const void *data, size_t size), (file, data, size))
ON_FILE(ssize_t, pwrite, WRITE, (int file, const void *data, size_t size, off_t at), (file, data, size, at))
ON_FILE(ssize_t, pwrite64, WRITE, (int file, const void *data, size_t size, off64_t at), (file, data, size, at))
ON_FILE(ssize_t, writev, WRITE, (int file, const struct iovec *data, int count), (file, data, count))
ON_FILE(int, fsync, FSYNC, (int file), (file))

size_t fwrite(const void *data, size_t size, size_t count, FILE *stream) {
    if (is_tracked(fileno(stream)) && fails(WRITE)) return 0;
    static auto call = real<size_t (*)(const void *, size_t, size_t, FILE *)>("fwrite");
    return call(data, size, count, stream);
}

#define ON_PATH(NAME, KIND, PARAMETERS, ARGUMENTS)                                                                     \
    int NAME PARAMETERS {                                                                                              \
        if (is_below(path) && fails(KIND)) return -1;                                                                  \
        static auto call = real<int(*) PARAMETERS>(#NAME);                                                             \
        return call ARGUMENTS;                                                                                         \
    }
ON_PATH(link, LINK, (const char *path, const char *target), (path, target))
ON_PATH(linkat, LINK, (int from, const char *path, int to, const char *target, int flags), (from, path, to, target, flags))
ON_PATH(rename, RENAME, (const char *path, const char *target), (path, target))
ON_PATH(renameat, RENAME, (int from, const char *path, int to, const char *target), (from, path, to, target))
ON_PATH(mkdir, MKDIR, (const char *path, mode_t mode), (path, mode))
ON_PATH(unlink, UNLINK, (const char *path), (path))

} // extern "C"
