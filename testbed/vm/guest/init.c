// SPDX-License-Identifier: Apache-2.0
// The first process of a testbed VM, and its only program that does not come from the host. It obeys the records that
// testbed/vm/job.py wrote into /job, passes the command's output on while it runs, reports how it ended, and switches
// the machine off.
//
// It is static and alone in the initramfs. So a VM needs neither busybox nor a shell, and starts in a fraction of a
// second. The Python side decides what to mount, load and set up; this file only does it.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define JOB_PATH "/job"
#define MOUNTS_MAX 64
#define MESSAGE_BYTES 4096
#define PUMP_BYTES 65536
#define OPEN_FILES 65536
// The kernel makes a device node or an address in the background, within milliseconds.
#define AWAIT_TIMEOUT_MS 10000
#define AWAIT_PAUSE_MS 2
// How often the guest says that its kernel still schedules. testbed/vm/runner.py waits a multiple of this time.
#define ALIVE_EVERY_MS 1000
// Exit codes of POSIX shells (POSIX.1-2017, Shell & Utilities, 2.8.2)
#define NOT_EXECUTABLE 126
#define NOT_FOUND 127
#define SIGNALLED 128

enum channel { OUTPUT, ERRORS, CONTROL, CHANNELS };

static int channels[CHANNELS] = {-1, -1, -1};
// Mounts of kept folders: their caches must be written before the machine ends.
static const char* kept[MOUNTS_MAX];
static int kept_count;

static void write_all(int descriptor, const char* data, size_t size_bytes) {
  while (size_bytes > 0) {
    ssize_t written = write(descriptor, data, size_bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;  // the host has gone, and will end this machine
    data += written;
    size_bytes -= (size_t)written;
  }
}

// Writes a line to the host: `alive`, `started`, `exit N` or `error TEXT`.
static void report(const char* format, ...) {
  char line[MESSAGE_BYTES];
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(line, sizeof line - 1, format, arguments);
  va_end(arguments);
  if (length > (int)sizeof line - 2) length = (int)sizeof line - 2;
  line[length++] = '\n';
  write_all(channels[CONTROL] >= 0 ? channels[CONTROL] : STDERR_FILENO, line, (size_t)length);
}

static _Noreturn void switch_off(void) {
  sync();
  for (int channel = 0; channel < CHANNELS; channel++) {
    if (channels[channel] >= 0) tcdrain(channels[channel]);
  }
  reboot(RB_POWER_OFF);
  for (;;) pause();
}

static _Noreturn void fail(const char* what, const char* which) {
  report("error %s %s: %s", what, which, strerror(errno));
  switch_off();
}

static void pause_ms(long milliseconds) {
  struct timespec pause = {milliseconds / 1000, milliseconds % 1000 * 1000000};
  nanosleep(&pause, NULL);
}

static long now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void load_module(const char* path) {
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0 || (syscall(SYS_finit_module, file, "", 0) < 0 && errno != EEXIST)) fail("load", path);
  close(file);
}

static void make_folder(const char* path) {
  if (mkdir(path, 0755) < 0 && errno != EEXIST) fail("mkdir", path);
}

static void mount_kept(char** argument) {
  if (kept_count == MOUNTS_MAX) {
    errno = ENOSPC;
    fail("mount", argument[1]);
  }
  kept[kept_count++] = argument[1];
}

static void enter_root(const char* path) {
  if (chdir(path) < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0) fail("enter", path);
}

static void write_file(const char* path, const char* text) {
  int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  size_t length = strlen(text);
  if (file < 0 || write(file, text, length) != (ssize_t)length) fail("write", path);
  close(file);
}

static bool holds(const char* path, const char* text) {
  char content[MESSAGE_BYTES];
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  ssize_t length = read(file, content, sizeof content - 1);
  close(file);
  content[length > 0 ? length : 0] = '\0';
  return strstr(content, text) != NULL;
}

// Waits until one of the files that match `pattern` holds `text`.
static void await_text(const char* pattern, const char* text) {
  for (long end_ms = now_ms() + AWAIT_TIMEOUT_MS; now_ms() < end_ms;) {
    glob_t found;
    bool there = false;
    if (glob(pattern, 0, NULL, &found) == 0) {
      for (size_t entry = 0; entry < found.gl_pathc && !there; entry++) there = holds(found.gl_pathv[entry], text);
      globfree(&found);
    }
    if (there) return;
    pause_ms(AWAIT_PAUSE_MS);
  }
  errno = ETIMEDOUT;
  fail(text, pattern);
}

static int open_channel(const char* path) {
  int descriptor = -1;
  for (long end_ms = now_ms() + AWAIT_TIMEOUT_MS; descriptor < 0 && now_ms() < end_ms;) {
    descriptor = open(path, O_WRONLY | O_NOCTTY | O_CLOEXEC);
    if (descriptor < 0) pause_ms(AWAIT_PAUSE_MS);
  }
  if (descriptor < 0) fail("open", path);
  struct termios settings;
  if (tcgetattr(descriptor, &settings) == 0) {
    cfmakeraw(&settings);  // keeps line feeds as they are
    if (tcsetattr(descriptor, TCSANOW, &settings) < 0) fail("set raw", path);
  }
  return descriptor;
}

static int wait_for(pid_t child) {
  int status;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return NOT_FOUND;
  }
  return WIFSIGNALED(status) ? SIGNALLED + WTERMSIG(status) : WEXITSTATUS(status);
}

// Runs a program of the host with `input` as its standard input. Its error messages go into the report.
static void run_step(const char* input, char** command) {
  int in = memfd_create("input", MFD_CLOEXEC);
  int out = memfd_create("output", MFD_CLOEXEC);
  if (in < 0 || out < 0) fail("run", command[0]);
  write_all(in, input, strlen(input));
  lseek(in, 0, SEEK_SET);
  pid_t child = fork();
  if (child < 0) fail("fork for", command[0]);
  if (child == 0) {
    dup2(in, STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    dup2(out, STDERR_FILENO);
    execvp(command[0], command);
    dprintf(STDERR_FILENO, "%s", strerror(errno));
    _exit(NOT_FOUND);
  }
  int code = wait_for(child);
  if (code != 0) {
    char text[MESSAGE_BYTES / 2];
    ssize_t length = pread(out, text, sizeof text - 1, 0);
    text[length > 0 ? length : 0] = '\0';
    for (char* end = text + strlen(text); end > text && end[-1] == '\n';) *--end = '\0';
    for (char* letter = text; *letter; letter++) *letter = *letter == '\n' ? ';' : *letter;
    char* last = command[0];
    for (char** word = command; *word; word++) last = *word;
    report("error '%s ... %s' ended with status %d: %s", command[0], last, code, text);
    switch_off();
  }
  close(in);
  close(out);
}

static _Noreturn void become_command(const char* folder, char** command, const int* output) {
  struct rlimit unlimited = {RLIM_INFINITY, RLIM_INFINITY};
  struct rlimit files = {OPEN_FILES, OPEN_FILES};
  setrlimit(RLIMIT_MEMLOCK, &unlimited);
  setrlimit(RLIMIT_NOFILE, &files);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  setsid();
  int nothing = open("/dev/null", O_RDONLY);
  dup2(nothing, STDIN_FILENO);
  close(nothing);
  dup2(output[OUTPUT], STDOUT_FILENO);
  dup2(output[ERRORS], STDERR_FILENO);
  if (chdir(folder) < 0) {
    dprintf(STDERR_FILENO, "%s: %s\n", folder, strerror(errno));
    _exit(NOT_EXECUTABLE);
  }
  execvp(command[0], command);
  dprintf(STDERR_FILENO, "%s: %s\n", command[0], strerror(errno));
  _exit(errno == ENOENT ? NOT_FOUND : NOT_EXECUTABLE);
}

// Passes on the waiting bytes. Returns false when there will be no more.
static bool pump(int from, int to) {
  static char buffer[PUMP_BYTES];
  for (;;) {
    ssize_t length = read(from, buffer, sizeof buffer);
    if (length < 0 && errno == EINTR) continue;
    if (length <= 0) return length < 0 && errno == EAGAIN;
    write_all(to, buffer, (size_t)length);
  }
}

// Runs the command and returns its exit code. Does not wait for processes that outlive it.
static int run_command(const char* folder, char** command) {
  sigset_t children;
  sigemptyset(&children);
  sigaddset(&children, SIGCHLD);
  sigprocmask(SIG_BLOCK, &children, NULL);
  int ended = signalfd(-1, &children, SFD_CLOEXEC | SFD_NONBLOCK);
  int read_ends[2], write_ends[2];
  for (int stream = OUTPUT; stream <= ERRORS; stream++) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0) fail("pipe for", command[0]);
    read_ends[stream] = ends[0];
    write_ends[stream] = ends[1];
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
  }
  pid_t child = fork();
  if (child < 0 || ended < 0) fail("fork for", command[0]);
  if (child == 0) become_command(folder, command, write_ends);
  for (int stream = OUTPUT; stream <= ERRORS; stream++) close(write_ends[stream]);
  report("started");

  struct pollfd watched[] = {{read_ends[OUTPUT], POLLIN, 0}, {read_ends[ERRORS], POLLIN, 0}, {ended, POLLIN, 0}};
  for (int code = -1; code < 0;) {
    if (poll(watched, 3, ALIVE_EVERY_MS) == 0) report("alive");
    struct signalfd_siginfo information;
    while (read(ended, &information, sizeof information) > 0) continue;
    int status;
    for (pid_t gone; (gone = waitpid(-1, &status, WNOHANG)) > 0;) {
      if (gone == child) code = WIFSIGNALED(status) ? SIGNALLED + WTERMSIG(status) : WEXITSTATUS(status);
    }
    // After the last check of the child, so that all its output is seen.
    for (int stream = OUTPUT; stream <= ERRORS; stream++) {
      if (watched[stream].fd >= 0 && !pump(read_ends[stream], channels[stream])) watched[stream].fd = -1;
    }
    if (code >= 0) return code;
  }
  return NOT_FOUND;
}

static _Noreturn void finish(int code) {
  kill(-1, SIGKILL);
  while (waitpid(-1, NULL, 0) > 0) continue;
  for (int mount = kept_count - 1; mount >= 0; mount--) {
    if (umount2(kept[mount], 0) < 0) fail("write back", kept[mount]);
  }
  for (int stream = OUTPUT; stream <= ERRORS; stream++) tcdrain(channels[stream]);
  report("exit %d", code);
  switch_off();
}

// Obeys one record of the job: a verb and its `count` arguments.
static void obey(const char* verb, char** argument, int count) {
  if (strcmp(verb, "load") == 0 && count == 1) {
    load_module(argument[0]);
  } else if (strcmp(verb, "mkdir") == 0 && count == 1) {
    make_folder(argument[0]);
  } else if (strcmp(verb, "mount") == 0 && count == 5) {
    unsigned long flags = strcmp(argument[3], "ro") == 0 ? MS_RDONLY : strcmp(argument[3], "move") == 0 ? MS_MOVE : 0;
    if (mount(argument[0], argument[1], argument[2], flags, argument[4]) < 0) fail("mount", argument[1]);
    if (strcmp(argument[3], "keep") == 0) mount_kept(argument);
  } else if (strcmp(verb, "enter") == 0 && count == 1) {
    enter_root(argument[0]);
  } else if (strcmp(verb, "link") == 0 && count == 2) {
    if (symlink(argument[0], argument[1]) < 0 && errno != EEXIST) fail("link", argument[1]);
  } else if (strcmp(verb, "write") == 0 && count == 2) {
    write_file(argument[0], argument[1]);
  } else if (strcmp(verb, "await") == 0 && count == 2) {
    await_text(argument[0], argument[1]);
  } else if (strcmp(verb, "channels") == 0 && count == CHANNELS) {
    // The control channel first, because it carries the errors of the others.
    for (int channel = CHANNELS - 1; channel >= 0; channel--) channels[channel] = open_channel(argument[channel]);
  } else if (strcmp(verb, "env") == 0 && count == 2) {
    setenv(argument[0], argument[1], 1);
  } else if (strcmp(verb, "hostname") == 0 && count == 1) {
    if (sethostname(argument[0], strlen(argument[0])) < 0) fail("hostname", argument[0]);
  } else if (strcmp(verb, "run") == 0 && count >= 2) {
    run_step(argument[0], argument + 1);
  } else if (strcmp(verb, "command") == 0 && count >= 2) {
    finish(run_command(argument[0], argument + 1));
  } else {
    errno = EINVAL;
    fail("record", verb);
  }
}

// The job is a series of strings, each ended by a NUL: for each record the number of its strings, then the strings.
int main(void) {
  struct stat size;
  int file = open(JOB_PATH, O_RDONLY | O_CLOEXEC);
  if (file < 0 || fstat(file, &size) < 0) fail("open", JOB_PATH);
  char* job = malloc((size_t)size.st_size + 1);
  ssize_t length = job ? read(file, job, (size_t)size.st_size) : -1;
  if (length != size.st_size) fail("read", JOB_PATH);
  clearenv();
  char* end = job + length;
  for (char* next = job; next < end;) {
    int count = atoi(next);
    next += strlen(next) + 1;
    char** words = calloc((size_t)count + 1, sizeof *words);
    if (words == NULL || count < 1) fail("read", JOB_PATH);
    for (int word = 0; word < count && next < end; word++) {
      words[word] = next;
      next += strlen(next) + 1;
    }
    obey(words[0], words + 1, count - 1);
    free(words);
  }
  errno = ENODATA;
  fail("command in", JOB_PATH);
}
