/* Asks Linux for the AMX registers of matrix products, which a process must do once.
 * https://docs.kernel.org/arch/x86/xstate.html
 * Refuses to know: products.
 */
#include "halves.h"

#if HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

static int has_tiles;

__attribute__((constructor)) static void ask(void) {
    has_tiles = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

int baton_has_tiles(void) { return has_tiles; }
#else
int baton_has_tiles(void) { return 0; }
#endif
