// A library for LD_PRELOAD that shifts the wall clock of one program.
//
// The environment variable BATON_CLOCK_SHIFT names a file of 8 bytes: the shift in seconds. The file
// is mapped, so the clock jumps when the file changes. Kernel and C library wait by the machine's
// true clock, so this library shifts deadlines on the wall clock back before each wait.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

// A larger deadline is on the wall clock; the monotonic clock counts from the machine's start.
#define EARLIEST_WALL_CLOCK_S 1000000000

static const volatile int64_t *shift_s;

__attribute__((constructor)) static void map_file(void) {
    const char *path = getenv("BATON_CLOCK_SHIFT");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED) shift_s = page;
}

static int64_t shift(void) { return shift_s ? *shift_s : 0; }

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

int clock_gettime(clockid_t clock, struct timespec *out) {
    REAL(clock_gettime);
    int result = real(clock, out);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) out->tv_sec += shift();
    return result;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    REAL(gettimeofday);
    int result = real(out, zone);
    if (!result) out->tv_sec += shift();
    return result;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

static struct timespec on_machine_clock(const struct timespec *deadline) {
    struct timespec shifted = *deadline;
    if (shifted.tv_sec > EARLIEST_WALL_CLOCK_S) shifted.tv_sec -= shift();
    return shifted;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    REAL(pthread_cond_timedwait);
    struct timespec shifted = on_machine_clock(deadline);
    return real(cond, mutex, &shifted);
}

int pthread_cond_clockwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, clockid_t clock,
                           const struct timespec *restrict deadline) {
    REAL(pthread_cond_clockwait);
    struct timespec shifted = on_machine_clock(deadline);
    return real(cond, mutex, clock, &shifted);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict deadline) {
    REAL(pthread_mutex_timedlock);
    struct timespec shifted = on_machine_clock(deadline);
    return real(mutex, &shifted);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    REAL(sem_timedwait);
    struct timespec shifted = on_machine_clock(deadline);
    return real(semaphore, &shifted);
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict deadline) {
    REAL(sem_clockwait);
    struct timespec shifted = on_machine_clock(deadline);
    return real(semaphore, clock, &shifted);
}

// Libraries such as Abseil wait with futexes, and call no function of the C library for it.
long syscall(long number, ...) {
    REAL(syscall);
    va_list list;
    va_start(list, number);
    long words[6];
    for (int i = 0; i < 6; i++) words[i] = va_arg(list, long);
    va_end(list);
    struct timespec shifted;
    if (number == SYS_futex && (words[1] & FUTEX_CLOCK_REALTIME) && words[3]) {
        shifted = on_machine_clock((const struct timespec *)words[3]);
        words[3] = (long)&shifted;
    }
    return real(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}
