/* A simulated libnvidia-ml.so.1: what pynvml asks of a host with GPUs, answered without any.
 *
 * Knobs are looked up at every query, first hit wins (N is the GPU's slot, its index while no GPU before it is gone):
 *     /run/nvml-sim/gpuN/KEY   /run/nvml-sim/KEY   (a file that holds the value)   then "KEY=value" in /etc/nvml-sim.conf
 * KEYs of the host: gpus, driver, cuda, seed (of the UUIDs; default the host name)
 * KEYs of a GPU:    name, cc (like 12.0), memory_mib, reserved_mib, idle_mib, linger_mib (used beyond what processes hold),
 *                   and the FIGURES: util, mem_util (%), power_w, power_limit_w, temp_c, sm_mhz, mem_mhz, sm_max_mhz, mem_max_mhz,
 *                   reasons (a bit mask), pcie_rx_mb_s, pcie_tx_mb_s, pcie_gen, pcie_width
 * KEY script of a GPU: its FIGURES over time, which go before all other knobs. Lines "SECONDS KEY=VALUE KEY=VALUE ..." in order; each
 *     holds until the next, the last for ever. Before them may stand "begin held": time then begins when a process holds the GPU, and
 *     again with the next holder; without it, it begins with the first figure that is asked for after the script was written.
 *     Comments begin with #. scriptN.began keeps when that was.
 * KEYs for faults, of a GPU; in /run/nvml-sim itself the first two are for nvmlInit and what is asked of no GPU, too:
 *     hang        lines "FUNCTION SECONDS": functions whose name begins so answer only after so long ("nvmlDevice 600")
 *     fail        lines "FUNCTION CODE": they answer with this code: "nvmlDevice 15" is a GPU that fell off the bus,
 *                 "nvmlDeviceGetComputeRunningProcesses 4" hides the processes, "nvmlDeviceGetTemperature 3" is N/A
 *     gone        1: no such GPU any more; those behind it move up
 *     linger_s    the memory of a process that ended stays so long after a query first missed it; -1: for ever
 *     hide_pids   1: processes hold memory, and none is reported
 * A wedged GPU is "linger_mib" or "util" without a process.
 * KEYs for MIG:     mig (how many MIG devices the GPU is divided into, each an equal share), mig_mode (1: on without any)
 *
 * Memory is held by processes while they live. A process holds some if its name begins with "sglang::schedul" (90000 MiB), or if
 * it begins with "gpuholder" and its environment has NVML_SIM_HOLD_MIB. That variable sets how many MiB, on each GPU of its
 * CUDA_VISIBLE_DEVICES (indices or UUIDs; unset: every GPU; empty: none). Of a GPU that is divided, it is the MIG device that it
 * names, or the first. Without the right to read another user's environment
 * its scheduler counts with the defaults.
 */
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, INSUFFICIENT_SIZE, GPU_IS_LOST = 15,
    VERSION_MISMATCH = 25
};
#define MAX_GPUS 64
#define MAX_MIG 8
#define MIB (1024ULL * 1024)
#define MEMORY_V2 0x02000028u

/* Field for field as in pynvml. */
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, device_id, subsystem_id; char bus_id[32]; } pci_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { unsigned version, sensor; int temperature; } temperature_t;
typedef void *device_t; /* the GPU's slot + 1; of a MIG device besides, from bit 8 on, its number + 1 */

static int users; /* nvmlInit less nvmlShutdown */

/* Files and knobs */

static ssize_t slurp(const char *path, char *text, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t length = 0;
    ssize_t got;
    if (fd < 0) return -1;
    while (length < size - 1 && (got = read(fd, text + length, size - 1 - length)) > 0) length += got;
    close(fd);
    text[length] = 0;
    return length;
}

static char *trim(char *text) {
    char *end = text + strlen(text);
    while (end > text && isspace((unsigned char)end[-1])) *--end = 0;
    while (isspace((unsigned char)*text)) text++;
    return text;
}

static int configured(const char *key, char *value, size_t size) {
    char text[4096], *line, *rest, *equals;
    if (slurp("/etc/nvml-sim.conf", text, sizeof text) < 0) return 0;
    for (line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        if (*trim(line) == '#' || !(equals = strchr(line, '='))) continue;
        *equals = 0;
        if (strcmp(trim(line), key) == 0) return snprintf(value, size, "%s", trim(equals + 1)), 1;
    }
    return 0;
}

static const char *text_knob(int gpu, const char *key, const char *fallback, char *value, size_t size) {
    char path[128];
    snprintf(path, sizeof path, "/run/nvml-sim/gpu%d/%s", gpu, key);
    if (slurp(path, value, size) >= 0) return trim(value);
    snprintf(path, sizeof path, "/run/nvml-sim/%s", key);
    if (slurp(path, value, size) >= 0) return trim(value);
    return configured(key, value, size) ? value : fallback;
}

static unsigned long long knob(int gpu, const char *key, unsigned long long fallback) {
    char value[64];
    const char *found = text_knob(gpu, key, NULL, value, sizeof value);
    return found ? strtoull(found, NULL, 0) : fallback;
}

/* What a knob made of lines "FUNCTION NUMBER" says of a function; 0 if nothing. */
static long long said_of(int gpu, const char *key, const char *function) {
    char text[1024], *line, *rest, name[128];
    const char *found = text_knob(gpu, key, NULL, text, sizeof text);
    long long number;
    for (line = found ? strtok_r(text, "\n", &rest) : NULL; line; line = strtok_r(NULL, "\n", &rest))
        if (sscanf(line, "%127s %lld", name, &number) == 2 && strncmp(function, name, strlen(name)) == 0) return number;
    return 0;
}

/* Every function begins so: it hangs and fails as it is told to. */
static int fault(int gpu, const char *function) {
    sleep((unsigned)said_of(gpu, "hang", function));
    return (int)said_of(gpu, "fail", function);
}

static int slots(void) {
    unsigned long long count = knob(-1, "gpus", 8);
    return count < MAX_GPUS ? (int)count : MAX_GPUS;
}

/* How many GPUs there are in the first slots: of all, their count; of those before a GPU, its index. */
static int gpus(int end) {
    int count = 0;
    for (int slot = 0; slot < end; slot++) count += !knob(slot, "gone", 0);
    return count;
}

static int slot_of(int index) {
    for (int slot = 0; slot < slots(); slot++)
        if (!knob(slot, "gone", 0) && index-- == 0) return slot;
    return -1;
}

static int mig_count(int gpu) {
    unsigned long long count = knob(gpu, "mig", 0);
    return count < MAX_MIG ? (int)count : MAX_MIG;
}

static int divided(int gpu) { return mig_count(gpu) || knob(gpu, "mig_mode", 0); }

/* The UUID of a GPU, or with part >= 0 of a MIG device of it. */
static void uuid_of(int gpu, int part, char *uuid, size_t size) {
    char host[256] = "", seed[300], value[256];
    uint64_t hash[2] = {0xcbf29ce484222325, 0x84222325cbf29ce4}; /* FNV-1a, twice */
    gethostname(host, sizeof host - 1);
    int length = snprintf(seed, sizeof seed, "%s/%d", text_knob(-1, "seed", host, value, sizeof value), gpu);
    if (part >= 0) snprintf(seed + length, sizeof seed - length, "/%d", part);
    for (int half = 0; half < 2; half++)
        for (const char *c = seed; *c; c++) hash[half] = (hash[half] ^ (unsigned char)*c) * 0x100000001b3;
    snprintf(uuid, size, "%s-%08x-%04x-%04x-%04x-%012llx", part < 0 ? "GPU" : "MIG", (unsigned)(hash[0] >> 32),
             (unsigned)(hash[0] >> 16) & 0xffff, (unsigned)hash[0] & 0xffff, (unsigned)(hash[1] >> 48),
             (unsigned long long)hash[1] & 0xffffffffffff);
}

/* Processes */

static const char *variable(const char *environment, ssize_t length, const char *name) {
    size_t size = strlen(name);
    for (const char *entry = environment; entry < environment + length; entry += strlen(entry) + 1)
        if (strncmp(entry, name, size) == 0 && entry[size] == '=') return entry + size + 1;
    return NULL;
}

static char state_of(int pid, int *parent) {
    char path[64], text[512], *end, state = 'X';
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    *parent = 0;
    if (slurp(path, text, sizeof text) > 0 && (end = strrchr(text, ')'))) sscanf(end + 1, " %c %d", &state, parent);
    return state;
}

/* setproctitle overwrites the environment of a scheduler, so the nearest one above that still reads like one counts. */
static ssize_t environment_of(int pid, char *environment, size_t size) {
    char path[64];
    for (int parent; pid > 1; pid = parent) {
        snprintf(path, sizeof path, "/proc/%d/environ", pid);
        ssize_t length = slurp(path, environment, size);
        if (length > 0 && (variable(environment, length, "PATH") || variable(environment, length, "NVML_SIM_HOLD_MIB"))) return length;
        state_of(pid, &parent);
    }
    return 0;
}

/* Whether a process with these CUDA_VISIBLE_DEVICES uses a GPU, or with part >= 0 this MIG device of it. */
static int sees(const char *visible, int gpu, int part) {
    char list[4096], uuid[96], mig[96], *entry, *rest, *end;
    if (!visible) return part <= 0;
    uuid_of(gpu, -1, uuid, sizeof uuid);
    snprintf(list, sizeof list, "%s", visible);
    for (entry = strtok_r(list, ",", &rest); entry; entry = strtok_r(NULL, ",", &rest)) {
        entry = trim(entry);
        if (strncmp(entry, "MIG-", 4) == 0) {
            for (int each = part < 0 ? 0 : part; each < (part < 0 ? mig_count(gpu) : part + 1); each++) {
                uuid_of(gpu, each, mig, sizeof mig);
                if (strcmp(entry, mig) == 0) return 1;
            }
            continue;
        }
        if (strncmp(entry, "GPU-", 4) == 0) {
            if (strncmp(entry, uuid, strlen(entry)) == 0) return part <= 0; /* CUDA takes the beginning of a UUID too */
            continue;
        }
        long index = strtol(entry, &end, 10);
        if (end == entry || *end || index < 0) return 0; /* as CUDA: nothing after an invalid entry is visible */
        if (slot_of((int)index) == gpu) return part <= 0;
    }
    return 0;
}

static unsigned long long held_by(int pid, int gpu, int part) {
    char path[64], name[32], environment[65536];
    const char *mib;
    int parent, scheduler;
    snprintf(path, sizeof path, "/proc/%d/comm", pid);
    if (slurp(path, name, sizeof name) < 0) return 0;
    scheduler = strncmp(name, "sglang::schedul", 15) == 0;
    if (!scheduler && strncmp(name, "gpuholder", 9) != 0) return 0;
    if (strchr("ZX", state_of(pid, &parent))) return 0; /* dead: its memory is free */
    ssize_t length = environment_of(pid, environment, sizeof environment);
    mib = variable(environment, length, "NVML_SIM_HOLD_MIB");
    if ((!mib && !scheduler) || !sees(variable(environment, length, "CUDA_VISIBLE_DEVICES"), gpu, part)) return 0;
    return (mib ? strtoull(mib, NULL, 10) : 90000) * MIB;
}

/* The processes that hold memory of a GPU: how many, their sum, and as many of them as there is room for. */
static unsigned holders(int gpu, int part, process_t *list, unsigned room, unsigned long long *sum) {
    struct dirent *entry;
    unsigned count = 0;
    DIR *proc = opendir("/proc");
    *sum = 0;
    while (proc && (entry = readdir(proc))) {
        unsigned long long bytes = held_by(atoi(entry->d_name), gpu, part);
        if (!bytes) continue;
        if (list && count < room) list[count] = (process_t){atoi(entry->d_name), bytes, ~0u, ~0u};
        *sum += bytes;
        count++;
    }
    if (proc) closedir(proc);
    return count;
}

/* What is held, and with "linger_s" for a while longer: a file keeps the most that was held, and since when it is not. */
static unsigned long long lingering(int gpu, int part, unsigned long long held) {
    long long seconds = (long long)knob(gpu, "linger_s", 0);
    char path[64], text[32];
    struct stat status;
    if (!seconds) return held;
    snprintf(path, sizeof path, "/run/nvml-sim/lingering%d.%d", gpu, part);
    unsigned long long before = slurp(path, text, sizeof text) > 0 ? strtoull(text, NULL, 10) : 0;
    if (held >= before) {
        FILE *file = fopen(path, "w");
        if (file) fprintf(file, "%llu held", held), fclose(file);
        return held;
    }
    if (strstr(text, "held")) { /* the first query that misses it */
        FILE *file = fopen(path, "w");
        if (file) fprintf(file, "%llu", before), fclose(file);
        return before;
    }
    if (seconds < 0 || (stat(path, &status) == 0 && time(NULL) - status.st_mtime < seconds)) return before;
    unlink(path);
    return held;
}

static memory_v2_t memory_of(int gpu, int part) {
    int shares = part < 0 ? 1 : mig_count(gpu);
    memory_v2_t memory = {.version = MEMORY_V2, .total = knob(gpu, "memory_mib", 97887) * MIB / shares,
                          .reserved = knob(gpu, "reserved_mib", 636) * MIB / shares};
    holders(gpu, part, NULL, 0, &memory.used);
    memory.used = lingering(gpu, part, memory.used) + (knob(gpu, "idle_mib", 4) + knob(gpu, "linger_mib", 0)) * MIB;
    if (memory.used > memory.total - memory.reserved) memory.used = memory.total - memory.reserved;
    memory.free = memory.total - memory.reserved - memory.used;
    return memory;
}

static int busy(int gpu) {
    unsigned long long sum;
    return holders(gpu, -1, NULL, 0, &sum) > 0;
}

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

/* For how many seconds the script of a GPU has run; -1 if it has not begun. A file keeps when it did, for every process that asks. */
static double script_time(int gpu, int when_held) {
    char path[64], source[64], text[64];
    struct stat written, began;
    snprintf(path, sizeof path, "/run/nvml-sim/script%d.began", gpu);
    if (when_held && !busy(gpu)) return unlink(path), -1;
    snprintf(source, sizeof source, "/run/nvml-sim/gpu%d/script", gpu);
    if (stat(source, &written) < 0) stat("/run/nvml-sim/script", &written);
    int stale = stat(path, &began) < 0 || began.st_mtim.tv_sec + began.st_mtim.tv_nsec / 1e9 < written.st_mtim.tv_sec + written.st_mtim.tv_nsec / 1e9;
    if (stale || slurp(path, text, sizeof text) <= 0) {
        char fresh[96];
        snprintf(fresh, sizeof fresh, "%s.%d", path, (int)getpid()); /* whole for whoever reads it meanwhile */
        FILE *file = fopen(fresh, "w");
        if (file) fprintf(file, "%.3f", now()), fclose(file), rename(fresh, path);
        return 0;
    }
    return now() - strtod(text, NULL);
}

/* What the script of a GPU says of a figure at this moment. */
static int scripted(int gpu, const char *key, unsigned long long *value) {
    static _Thread_local char text[65536];
    char *line, *rest, *word, *words, *end;
    size_t size = strlen(key);
    double at = -2;
    int found = 0;
    if (!text_knob(gpu, "script", NULL, text, sizeof text)) return 0;
    for (line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        if (*trim(line) == '#' || !*trim(line)) continue;
        if (at == -2) at = script_time(gpu, strncmp(trim(line), "begin held", 10) == 0);
        double begins = strtod(line, &end);
        if (end == line) continue;
        if (begins > at) break;
        for (word = strtok_r(end, " \t\r", &words); word; word = strtok_r(NULL, " \t\r", &words))
            if (strncmp(word, key, size) == 0 && word[size] == '=') *value = strtoull(word + size + 1, NULL, 0), found = 1;
    }
    return found;
}

static unsigned long long figure(int gpu, const char *key, unsigned long long fallback) {
    unsigned long long value;
    return scripted(gpu, key, &value) ? value : knob(gpu, key, fallback);
}

/* The interface, in pynvml's order. DEVICE() checks the arguments that all queries of one GPU or MIG device share, GPU() takes no
 * MIG device, and HOST() is for what is asked of neither. */

#define HOST()                                                                  \
    int failed = fault(-1, __func__);                                           \
    if (failed) return failed;                                                  \
    if (!users) return UNINITIALIZED
#define DEVICE(device, out)                                                     \
    int gpu = (int)((intptr_t)(device)&0xff) - 1, part = (int)((intptr_t)(device) >> 8) - 1; \
    if (!users) return UNINITIALIZED;                                           \
    if (gpu < 0 || gpu >= slots() || part >= mig_count(gpu) || !(out)) return INVALID_ARGUMENT; \
    int failed = fault(gpu, __func__);                                          \
    if (failed || knob(gpu, "gone", 0)) return failed ? failed : GPU_IS_LOST
#define GPU(device, out)                                                        \
    DEVICE(device, out);                                                        \
    if (part >= 0) return NOT_SUPPORTED

static device_t handle_of(int gpu, int part) { return (device_t)(intptr_t)((part + 1) << 8 | (gpu + 1)); }

static int copy(char *out, unsigned size, const char *text) {
    return snprintf(out, size, "%s", text) < (int)size ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlInitWithFlags(unsigned flags) {
    int failed = fault(-1, __func__);
    return (void)flags, failed ? failed : (users++, SUCCESS);
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) { return users ? users--, SUCCESS : UNINITIALIZED; }

const char *nvmlErrorString(int code) {
    switch (code) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case GPU_IS_LOST: return "GPU is lost";
    case VERSION_MISMATCH: return "Argument Version Mismatch";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    HOST();
    char value[80];
    return copy(version, size, text_knob(-1, "driver", "580.95.05", value, sizeof value));
}

int nvmlSystemGetCudaDriverVersion(int *version) {
    HOST();
    return *version = knob(-1, "cuda", 13000), SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

int nvmlDeviceGetCount_v2(unsigned *count) {
    HOST();
    return *count = gpus(slots()), SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) {
    GPU((intptr_t)slot_of((int)index) + 1, device);
    return *device = handle_of(gpu, -1), SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *wanted, device_t *device) {
    char uuid[96];
    if (!users) return UNINITIALIZED;
    for (int gpu = 0; gpu < slots(); gpu++)
        for (int part = -1; part < mig_count(gpu); part++) {
            uuid_of(gpu, part, uuid, sizeof uuid);
            if (strcmp(uuid, wanted) || knob(gpu, "gone", 0)) continue;
            *device = handle_of(gpu, part);
            return fault(gpu, __func__);
        }
    return NOT_FOUND;
}

int nvmlDeviceGetName(device_t device, char *name, unsigned size) {
    DEVICE(device, name);
    char value[96], full[128];
    const char *found = text_knob(gpu, "name", "NVIDIA RTX PRO 6000 Blackwell Server Edition", value, sizeof value);
    snprintf(full, sizeof full, "%s%s", found, part < 0 ? "" : " MIG");
    return copy(name, size, full);
}

int nvmlDeviceGetUUID(device_t device, char *uuid, unsigned size) {
    DEVICE(device, uuid);
    char value[96];
    uuid_of(gpu, part, value, sizeof value);
    return copy(uuid, size, value);
}

int nvmlDeviceGetIndex(device_t device, unsigned *index) {
    GPU(device, index);
    return *index = gpus(gpu), SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(device_t device, pci_t *pci) {
    GPU(device, pci);
    *pci = (pci_t){.bus = gpu + 1, .device_id = 0x2bb510de, .subsystem_id = 0x204b10de};
    snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", pci->bus & 0xff);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", pci->bus & 0xff);
    return SUCCESS;
}

/* Version 1 knows no reserved memory and counts it as used. */
int nvmlDeviceGetMemoryInfo(device_t device, memory_t *memory) {
    DEVICE(device, memory);
    memory_v2_t now = memory_of(gpu, part);
    *memory = (memory_t){now.total, now.free, now.used + now.reserved};
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(device_t device, memory_v2_t *memory) {
    DEVICE(device, memory);
    if (memory->version != MEMORY_V2) return VERSION_MISMATCH;
    return *memory = memory_of(gpu, part), SUCCESS;
}

int nvmlDeviceGetUtilizationRates(device_t device, utilization_t *rates) {
    GPU(device, rates);
    if (divided(gpu)) return NOT_SUPPORTED;
    return *rates = (utilization_t){figure(gpu, "util", 0), figure(gpu, "mem_util", 0)}, SUCCESS;
}

int nvmlDeviceGetPowerUsage(device_t device, unsigned *milliwatts) {
    GPU(device, milliwatts);
    return *milliwatts = 1000 * figure(gpu, "power_w", busy(gpu) ? 90 : 30), SUCCESS;
}

int nvmlDeviceGetEnforcedPowerLimit(device_t device, unsigned *milliwatts) {
    GPU(device, milliwatts);
    return *milliwatts = 1000 * figure(gpu, "power_limit_w", 600), SUCCESS;
}

int nvmlDeviceGetPowerManagementLimit(device_t device, unsigned *milliwatts) { return nvmlDeviceGetEnforcedPowerLimit(device, milliwatts); }

int nvmlDeviceGetClockInfo(device_t device, unsigned type, unsigned *mhz) {
    GPU(device, mhz);
    if (type > 3) return INVALID_ARGUMENT;
    return *mhz = type == 2 ? figure(gpu, "mem_mhz", busy(gpu) ? 12481 : 405) : figure(gpu, "sm_mhz", busy(gpu) ? 2280 : 180), SUCCESS;
}

int nvmlDeviceGetMaxClockInfo(device_t device, unsigned type, unsigned *mhz) {
    GPU(device, mhz);
    if (type > 3) return INVALID_ARGUMENT;
    return *mhz = type == 2 ? figure(gpu, "mem_max_mhz", 12481) : figure(gpu, "sm_max_mhz", 2430), SUCCESS;
}

int nvmlDeviceGetTemperature(device_t device, unsigned sensor, unsigned *celsius) {
    GPU(device, celsius);
    return sensor ? INVALID_ARGUMENT : (*celsius = figure(gpu, "temp_c", busy(gpu) ? 45 : 33), SUCCESS);
}

int nvmlDeviceGetTemperatureV(device_t device, temperature_t *reading) {
    GPU(device, reading);
    unsigned celsius;
    int code = nvmlDeviceGetTemperature(device, reading->sensor, &celsius);
    if (code == SUCCESS) reading->temperature = (int)celsius;
    return code;
}

int nvmlDeviceGetCudaComputeCapability(device_t device, int *major, int *minor) {
    DEVICE(device, major);
    char value[32];
    return sscanf(text_knob(gpu, "cc", "12.0", value, sizeof value), "%d.%d", major, minor) == 2 ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned *count, process_t *processes) {
    DEVICE(device, count);
    unsigned long long sum;
    unsigned room = processes ? *count : 0;
    if (knob(gpu, "hide_pids", 0)) return *count = 0, SUCCESS;
    *count = holders(gpu, part, processes, room, &sum);
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(device_t device, unsigned long long *reasons) {
    GPU(device, reasons);
    return *reasons = figure(gpu, "reasons", busy(gpu) ? 0 : 1), SUCCESS; /* 1: the GPU is idle */
}

int nvmlDeviceGetCurrentClocksThrottleReasons(device_t device, unsigned long long *reasons) {
    return nvmlDeviceGetCurrentClocksEventReasons(device, reasons);
}

/* In KB/s; the driver counts for 20 ms. */
int nvmlDeviceGetPcieThroughput(device_t device, unsigned counter, unsigned *rate) {
    GPU(device, rate);
    if (counter > 1) return INVALID_ARGUMENT;
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    return *rate = 1000 * figure(gpu, counter ? "pcie_rx_mb_s" : "pcie_tx_mb_s", 0), SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkGeneration(device_t device, unsigned *generation) {
    GPU(device, generation);
    return *generation = figure(gpu, "pcie_gen", 5), SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkWidth(device_t device, unsigned *width) {
    GPU(device, width);
    return *width = figure(gpu, "pcie_width", 16), SUCCESS;
}

int nvmlDeviceGetMigMode(device_t device, unsigned *current, unsigned *pending) {
    GPU(device, current);
    return divided(gpu) ? *pending = *current = 1, SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetMaxMigDeviceCount(device_t device, unsigned *count) {
    GPU(device, count);
    return *count = MAX_MIG, SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device_t device, unsigned index, device_t *mig) {
    GPU(device, mig);
    if ((int)index >= mig_count(gpu)) return index < MAX_MIG ? NOT_FOUND : INVALID_ARGUMENT;
    return *mig = handle_of(gpu, (int)index), SUCCESS;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device_t device, device_t *parent) {
    DEVICE(device, parent);
    return part < 0 ? INVALID_ARGUMENT : (*parent = handle_of(gpu, -1), SUCCESS);
}

int nvmlDeviceGetGpuInstanceId(device_t device, unsigned *id) {
    DEVICE(device, id);
    return part < 0 ? INVALID_ARGUMENT : (*id = part + 1, SUCCESS);
}

int nvmlDeviceGetComputeInstanceId(device_t device, unsigned *id) {
    DEVICE(device, id);
    return part < 0 ? INVALID_ARGUMENT : (*id = 0, SUCCESS);
}

int nvmlDeviceIsMigDeviceHandle(device_t device, unsigned *is) {
    DEVICE(device, is);
    return *is = part >= 0, SUCCESS;
}
