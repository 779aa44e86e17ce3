/* Versions of glibc's functions that every glibc has.
 *
 * glibc 2.34 moved thread functions into libc, with a new version. With the old version, a library built here also
 * loads with an older glibc.
 */
#ifndef BATON_OLD_GLIBC_H
#define BATON_OLD_GLIBC_H

#if defined(__GLIBC__) && defined(__PIC__) && !defined(__PIE__)
#if defined(__x86_64__) && !defined(__ILP32__)
#define OLD_VERSION "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define OLD_VERSION "GLIBC_2.17"
#endif
#endif
#ifdef OLD_VERSION
__asm__(".symver pthread_once, pthread_once@" OLD_VERSION);
__asm__(".symver pthread_key_create, pthread_key_create@" OLD_VERSION);
__asm__(".symver pthread_setspecific, pthread_setspecific@" OLD_VERSION);
__asm__(".symver pthread_create, pthread_create@" OLD_VERSION);
__asm__(".symver pthread_join, pthread_join@" OLD_VERSION);
#endif
#endif
