// A CUDA driver without a GPU: says yes to all that Triton asks, and counts launches.
//
// Triton's own launch code (C and Python) runs over it unchanged, down to cuLaunchKernelEx.
#include <stdint.h>
#include <string.h>

#define MAX_PARAMETERS 64

typedef int CUresult;
typedef struct {
  unsigned int grid[3];
} LaunchConfig;  // how CUlaunchConfig begins

static uint64_t num_launches, num_pointer_queries;
static unsigned int last_grid[3];
static void *last_function;
static uint64_t last_parameters[MAX_PARAMETERS];
static unsigned int num_watched;  // parameters that are kept of each launch
static uint64_t next_handle = 1;

uint64_t fake_num_launches(void) { return num_launches; }
uint64_t fake_num_pointer_queries(void) { return num_pointer_queries; }
const unsigned int *fake_last_grid(void) { return last_grid; }
const void *fake_last_function(void) { return last_function; }
const uint64_t *fake_last_parameters(void) { return last_parameters; }
void fake_watch(unsigned int num_parameters) { num_watched = num_parameters; }

CUresult cuLaunchKernelEx(const LaunchConfig *config, void *function, void **parameters,
                          void **extra) {
  memcpy(last_grid, config->grid, sizeof last_grid);
  last_function = function;
  for (unsigned int i = 0; i < num_watched; i++)
    memcpy(&last_parameters[i], parameters[i], sizeof last_parameters[i]);
  num_launches++;
  return 0;
}

CUresult cuPointerGetAttribute(void *data, int attribute, uint64_t pointer) {
  num_pointer_queries++;
  memcpy(data, &pointer, sizeof pointer);
  return 0;
}

CUresult cuPointerGetAttributes(unsigned int n, int *attributes, void **data, uint64_t pointer) {
  num_pointer_queries++;
  return 0;
}

CUresult cuModuleLoadData(void **module, const void *image) {
  *module = (void *)next_handle++;
  return 0;
}

CUresult cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = (void *)next_handle++;
  return 0;
}

CUresult cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : 0;  // threads of a block; bytes of everything else
  return 0;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = 232448;  // of shared memory, which is all that is asked for
  return 0;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "the fake driver fails at nothing";
  return 0;
}

CUresult cuDriverGetVersion(int *version) {
  *version = 12080;
  return 0;
}

CUresult cuCtxGetCurrent(void **context) {
  *context = (void *)1;
  return 0;
}

CUresult cuCtxSetCurrent(void *context) { return 0; }
CUresult cuCtxGetLimit(uint64_t *value, int limit) { return 0; }
CUresult cuCtxSetLimit(int limit, uint64_t value) { return 0; }
CUresult cuDeviceGet(int *device, int ordinal) { return *device = 0; }
CUresult cuDevicePrimaryCtxRetain(void **context, int device) { return cuCtxGetCurrent(context); }
CUresult cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
CUresult cuFuncSetCacheConfig(void *function, int config) { return 0; }
CUresult cuOccupancyMaxActiveClusters(int *num, void *function, void *config) { return *num = 0; }
CUresult cuTensorMapEncodeTiled(void) { return 0; }
CUresult cuTensorMapEncodeIm2col(void) { return 0; }
