/* The middle of the WAN lab: carries IP packets between hosts as access links of some quality would.
 *
 *     host i                                hub                                 host j
 *     wan0 ==TUN==> | up queue, up rate | -delay i-> | down queue, down rate | -delay j-> ==TUN== wan0
 *                     drop-tail, loss i                drop-tail, loss j
 *
 * A queue is no list of waiting packets but the time at which its line will be free again (virtual
 * finish time): a packet is given its departure as it comes, or dropped if the line is too far
 * behind. What is on its way lies in one list per line, in order of departure, since neither a
 * changed rate nor a changed delay may let packets overtake each other. Late wake-ups do no harm to
 * rates: departures are computed from the times at which packets were due, not from the clock.
 *
 * Packets of TCP come in bundles, as a network card gets them (TSO): one header, many segments. On the
 * lines they count as the packets that they stand for, each with its header and its own chance of
 * loss; a bundle that loses some is cut. Without bundles the hosts' kernels, which share our
 * processors, could not fill the lines.
 *
 * Usage: wan_hub SEED BITS NAMESPACE_PATH...   makes one TUN device "wan0" in each namespace, says
 * "ready", then takes commands on standard input, one a line, and answers each with one line. BITS
 * of an address tell apart what is behind one host, a router: 0, host 0 is 198.18.0.1; 8, host 0 has
 * all of 198.18.1.0/24.
 *
 *     set HOST UP_BITS_PER_S DOWN_BITS_PER_S DELAY_NS LOSS UP_QUEUE_BYTES DOWN_QUEUE_BYTES
 *     stats
 *
 * A rate of 0 is no limit. The end of standard input ends the hub, so it never outlives its lab.
 * Rates count IP packets, headers included; packets to nobody in the lab are dropped.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum {
    HOSTS_MAX = 128,
    PACKET_BYTES_MAX = 65535,
    READS_PER_TURN = 64, /* of one host before the others get theirs */
    COMMAND_BYTES_MAX = 4096,
    ANSWER_BYTES_MAX = 65536,
    NICENESS = -15,
};

/* Packets of one moment leave together: a wake-up each would cost more than carrying them. */
static const int64_t QUANTUM_NS = 100 * 1000;
static const uint32_t NETWORK = 0xC6120000; /* 198.18.0.0/15: reserved for benchmarks */

struct packet {
    struct packet *next;
    int64_t due_ns;
    int bytes;         /* of the bundle, one header included */
    int header_bytes;  /* IP and TCP; meaningless if it is no bundle */
    int segment_bytes; /* of a segment without header; 0: one plain packet */
    int segment_count;
    uint8_t to;
    /* What the device reads and writes in one piece. */
    struct virtio_net_hdr offload;
    unsigned char data[];
};

struct line {
    int64_t bits_per_s; /* 0: no limit */
    int64_t queue_bytes_max;
    int64_t free_ns; /* when it will have sent all that it has */
    int64_t last_due_ns;
    struct packet *first, *last; /* on their way, in order of departure */
    uint64_t random_state;
    int64_t packets, bytes, lost, dropped, queue_bytes_seen;
};

struct host {
    int tun;
    int64_t delay_ns;
    double loss;
    struct line up, down;
    int64_t refused; /* packets that the host's kernel did not take */
};

_Static_assert(offsetof(struct packet, data) ==
                   offsetof(struct packet, offload) + sizeof(struct virtio_net_hdr),
               "a packet's data follows its offload header");

static struct host hosts[HOSTS_MAX];
static int host_count;
static int bits_behind;
static int64_t late_ns_max, late_ns_sum, delivered;
static int64_t armed_ns; /* what the timer is set for; 0: not set */

static void die(const char *what) {
    fprintf(stderr, "wan_hub: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* splitmix64, as a number from 0 to 1 */
static double chance(uint64_t *state) {
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
}

static void append(struct line *line, struct packet *packet) {
    packet->next = NULL;
    if (line->first == NULL)
        line->first = packet;
    else
        line->last->next = packet;
    line->last = packet;
}

/* Bytes of one segment on the line. */
static int wire_bytes(const struct packet *packet, int segment) {
    if (packet->segment_count == 1)
        return packet->bytes;
    if (segment < packet->segment_count - 1)
        return packet->header_bytes + packet->segment_bytes;
    return packet->bytes - segment * packet->segment_bytes;
}

/* Put one segment that comes at `at_ns` on a line; false if it does not reach the other end. */
static bool transmit(const struct host *host, struct line *line, int bytes, int64_t at_ns) {
    int64_t wait_ns = line->free_ns > at_ns ? line->free_ns - at_ns : 0;
    if (line->bits_per_s > 0) {
        int64_t queued = bytes + (int64_t)((double)wait_ns * 1e-9 * (double)line->bits_per_s / 8.0);
        if (queued > line->queue_bytes_max) {
            line->dropped++;
            return false;
        }
        if (queued > line->queue_bytes_seen)
            line->queue_bytes_seen = queued;
        wait_ns += (int64_t)(bytes * 8e9 / (double)line->bits_per_s);
    }
    line->free_ns = at_ns + wait_ns;
    line->packets++;
    line->bytes += bytes;
    if (host->loss > 0 && chance(&line->random_state) < host->loss) {
        line->lost++;
        return false;
    }
    return true;
}

static void depart(const struct host *host, struct line *line, struct packet *packet) {
    packet->due_ns = line->free_ns + host->delay_ns;
    if (packet->due_ns < line->last_due_ns)
        packet->due_ns = line->last_due_ns;
    line->last_due_ns = packet->due_ns;
    append(line, packet);
}

static uint32_t sum_words(const void *data, int bytes) {
    const unsigned char *at = data;
    uint32_t sum = 0;
    for (int i = 0; i < bytes; i += 2)
        sum += (uint32_t)(at[i] << 8 | at[i + 1]);
    return sum;
}

static uint16_t fold(uint32_t sum) {
    while (sum >> 16)
        sum = (sum & 0xFFFF) + (sum >> 16);
    return (uint16_t)sum;
}

static struct packet *new_packet(int bytes) {
    struct packet *packet = malloc(sizeof *packet + (size_t)bytes);
    if (packet == NULL)
        die("a packet");
    return packet;
}

/* A bundle of some segments of another: `count` from `first` on. */
static struct packet *cut(const struct packet *whole, int first, int count) {
    int skipped = first * whole->segment_bytes;
    bool last = first + count == whole->segment_count;
    int body_bytes = last ? whole->bytes - whole->header_bytes - skipped
                          : count * whole->segment_bytes;
    struct packet *part = new_packet(whole->header_bytes + body_bytes);
    *part = *whole;
    part->bytes = whole->header_bytes + body_bytes;
    part->segment_count = count;
    if (count == 1) {
        part->offload.gso_type = VIRTIO_NET_HDR_GSO_NONE;
        part->offload.gso_size = 0;
    }
    memcpy(part->data, whole->data, (size_t)whole->header_bytes);
    memcpy(part->data + whole->header_bytes, whole->data + whole->header_bytes + skipped,
           (size_t)body_bytes);
    struct iphdr *ip = (struct iphdr *)part->data;
    int ip_bytes = ip->ihl * 4;
    struct tcphdr *tcp = (struct tcphdr *)(part->data + ip_bytes);
    ip->tot_len = htons((uint16_t)part->bytes);
    ip->id = htons((uint16_t)(ntohs(ip->id) + first));
    ip->check = 0;
    ip->check = htons((uint16_t)~fold(sum_words(ip, ip_bytes)));
    tcp->seq = htonl(ntohl(tcp->seq) + (uint32_t)skipped);
    if (!last)
        tcp->fin = tcp->psh = 0;
    /* The rest of the checksum is the receiving device's affair: it was promised by NEEDS_CSUM. */
    tcp->check = htons(fold(sum_words(&ip->saddr, 8) + IPPROTO_TCP +
                            (uint32_t)(part->bytes - ip_bytes)));
    return part;
}

/* Put what comes at `at_ns` on a line, as much of it as the line carries. Takes the packet over. */
static void carry(const struct host *host, struct line *line, struct packet *packet,
                  int64_t at_ns) {
    int first = 0; /* of the segments that arrive one after the other */
    for (int i = 0; i < packet->segment_count; i++) {
        if (transmit(host, line, wire_bytes(packet, i), at_ns))
            continue;
        if (i > first)
            depart(host, line, cut(packet, first, i - first));
        first = i + 1;
    }
    if (first == 0) {
        depart(host, line, packet);
        return;
    }
    if (first < packet->segment_count)
        depart(host, line, cut(packet, first, packet->segment_count - first));
    free(packet);
}

/* Make a packet of what a host's device gave us; NULL if it is for nobody here. */
static struct packet *parse(const unsigned char *buffer, ssize_t count) {
    const int offload_bytes = sizeof(struct virtio_net_hdr);
    int bytes = (int)count - offload_bytes;
    const struct iphdr *ip = (const struct iphdr *)(buffer + offload_bytes);
    if (bytes < (int)sizeof *ip || ip->version != 4)
        return NULL;
    uint32_t number = ((ntohl(ip->daddr) - NETWORK) >> bits_behind) - 1;
    if (number >= (uint32_t)host_count)
        return NULL;
    struct packet *packet = new_packet(bytes);
    memcpy(&packet->offload, buffer, (size_t)count); /* and the data, which follow it */
    packet->bytes = bytes;
    packet->to = (uint8_t)number;
    packet->header_bytes = 0;
    packet->segment_bytes = 0;
    packet->segment_count = 1;
    if (packet->offload.gso_type == VIRTIO_NET_HDR_GSO_TCPV4) {
        const struct tcphdr *tcp = (const struct tcphdr *)((const char *)ip + ip->ihl * 4);
        packet->header_bytes = ip->ihl * 4 + tcp->doff * 4;
        packet->segment_bytes = packet->offload.gso_size;
        int body_bytes = bytes - packet->header_bytes;
        packet->segment_count =
            (body_bytes + packet->segment_bytes - 1) / packet->segment_bytes;
    }
    return packet;
}

/* Read what a host sends, up to its turn's share. */
static void take_packets(struct host *host) {
    static unsigned char buffer[sizeof(struct virtio_net_hdr) + PACKET_BYTES_MAX];
    int64_t at_ns = now_ns();
    for (int i = 0; i < READS_PER_TURN; i++) {
        ssize_t count = read(host->tun, buffer, sizeof buffer);
        if (count < 0) {
            if (errno == EAGAIN || errno == EINTR)
                return;
            die("reading from a TUN device");
        }
        struct packet *packet = parse(buffer, count);
        if (packet != NULL)
            carry(host, &host->up, packet, at_ns);
    }
}

static void deliver(struct host *host, struct packet *packet, int64_t clock_ns) {
    int64_t late_ns = clock_ns - packet->due_ns;
    late_ns_sum += late_ns;
    if (late_ns > late_ns_max)
        late_ns_max = late_ns;
    delivered++;
    size_t bytes = sizeof packet->offload + (size_t)packet->bytes;
    if (write(host->tun, &packet->offload, bytes) != (ssize_t)bytes)
        host->refused++;
    free(packet);
}

/* Move everything that is due, in order of time over all lines; gives when the next one is due. */
static int64_t move_due(int64_t clock_ns) {
    for (;;) {
        int64_t due_ns = INT64_MAX;
        struct line *line = NULL;
        struct host *host = NULL;
        for (int i = 0; i < host_count; i++) {
            struct host *each = &hosts[i];
            if (each->up.first != NULL && each->up.first->due_ns < due_ns)
                host = each, line = &each->up, due_ns = line->first->due_ns;
            if (each->down.first != NULL && each->down.first->due_ns < due_ns)
                host = each, line = &each->down, due_ns = line->first->due_ns;
        }
        if (due_ns > clock_ns)
            return due_ns;
        struct packet *packet = line->first;
        line->first = packet->next;
        if (line == &host->up)
            carry(&hosts[packet->to], &hosts[packet->to].down, packet, due_ns);
        else
            deliver(host, packet, clock_ns);
    }
}

static void arm(int timer, int64_t due_ns) {
    if (due_ns != INT64_MAX)
        due_ns = (due_ns / QUANTUM_NS + 1) * QUANTUM_NS;
    if (due_ns == armed_ns)
        return;
    armed_ns = due_ns;
    struct itimerspec setting = {0};
    if (due_ns != INT64_MAX) {
        setting.it_value.tv_sec = due_ns / 1000000000;
        setting.it_value.tv_nsec = due_ns % 1000000000;
    }
    if (timerfd_settime(timer, TFD_TIMER_ABSTIME, &setting, NULL) < 0)
        die("timerfd_settime");
}

static int line_stats(char *out, size_t room, const char *name, const struct line *line) {
    return snprintf(out, room,
                    "\"%s\": {\"packets\": %" PRId64 ", \"bytes\": %" PRId64 ", \"lost\": %" PRId64
                    ", \"dropped\": %" PRId64 ", \"queue_bytes_max\": %" PRId64 "}",
                    name, line->packets, line->bytes, line->lost, line->dropped,
                    line->queue_bytes_seen);
}

/* Seconds of a processor that we used since we started. */
static double cpu_s(void) {
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void answer_stats(void) {
    static char out[ANSWER_BYTES_MAX];
    size_t at = 0;
    at += (size_t)snprintf(out + at, sizeof out - at,
                           "{\"late_ms_max\": %.3f, \"late_ms_mean\": %.4f, \"cpu_s\": %.3f, "
                           "\"hosts\": [",
                           (double)late_ns_max * 1e-6,
                           delivered ? (double)late_ns_sum * 1e-6 / (double)delivered : 0.0,
                           cpu_s());
    for (int i = 0; i < host_count; i++) {
        at += (size_t)snprintf(out + at, sizeof out - at, "%s{", i ? ", " : "");
        at += (size_t)line_stats(out + at, sizeof out - at, "up", &hosts[i].up);
        at += (size_t)snprintf(out + at, sizeof out - at, ", ");
        at += (size_t)line_stats(out + at, sizeof out - at, "down", &hosts[i].down);
        at += (size_t)snprintf(out + at, sizeof out - at, ", \"refused\": %" PRId64 "}",
                               hosts[i].refused);
    }
    printf("%s]}\n", out);
    late_ns_max = late_ns_sum = delivered = 0;
}

static void obey(const char *command) {
    int number;
    int64_t up, down, delay_ns, up_queue, down_queue;
    double loss;
    if (strcmp(command, "stats") == 0) {
        answer_stats();
    } else if (sscanf(command,
                      "set %d %" SCNd64 " %" SCNd64 " %" SCNd64 " %lf %" SCNd64 " %" SCNd64,
                      &number, &up, &down, &delay_ns, &loss, &up_queue, &down_queue) == 7 &&
               number >= 0 && number < host_count) {
        struct host *host = &hosts[number];
        host->up.bits_per_s = up;
        host->down.bits_per_s = down;
        host->delay_ns = delay_ns;
        host->loss = loss;
        host->up.queue_bytes_max = up_queue;
        host->down.queue_bytes_max = down_queue;
        printf("ok\n");
    } else {
        printf("what?\n");
    }
    fflush(stdout);
}

/* False when the lab is gone. */
static bool take_commands(void) {
    static char buffer[COMMAND_BYTES_MAX];
    static size_t filled;
    ssize_t count = read(STDIN_FILENO, buffer + filled, sizeof buffer - filled);
    if (count <= 0)
        return count < 0 && errno == EINTR;
    filled += (size_t)count;
    char *end;
    while ((end = memchr(buffer, '\n', filled)) != NULL) {
        *end = '\0';
        obey(buffer);
        filled -= (size_t)(end + 1 - buffer);
        memmove(buffer, end + 1, filled);
    }
    return filled < sizeof buffer;
}

static int open_tun(const char *namespace_path, int home) {
    int namespace = open(namespace_path, O_RDONLY | O_CLOEXEC);
    if (namespace < 0 || setns(namespace, CLONE_NEWNET) < 0)
        die(namespace_path);
    close(namespace);
    int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (tun < 0)
        die("/dev/net/tun");
    struct ifreq request = {.ifr_name = "wan0", .ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    if (ioctl(tun, TUNSETIFF, &request) < 0 || ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) < 0)
        die("making a TUN device");
    if (setns(home, CLONE_NEWNET) < 0)
        die("going back to our own namespace");
    return tun;
}

static void watch(int poll, int fd, uint32_t number) {
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = number};
    if (epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event) < 0)
        die("epoll_ctl");
}

int main(int argc, char **argv) {
    if (argc < 4 || argc - 3 > HOSTS_MAX) {
        fprintf(stderr, "usage: wan_hub SEED BITS NAMESPACE_PATH... (at most %d)\n", HOSTS_MAX);
        return 2;
    }
    uint64_t seed = strtoull(argv[1], NULL, 10);
    bits_behind = atoi(argv[2]);
    host_count = argc - 3;
    int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    int poll = epoll_create1(EPOLL_CLOEXEC);
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (home < 0 || poll < 0 || timer < 0)
        die("starting");
    /* A network does not wait for its users. Where real time is not allowed, nearly so. */
    if (sched_setscheduler(0, SCHED_RR, &(struct sched_param){.sched_priority = 1}) < 0)
        setpriority(PRIO_PROCESS, 0, NICENESS);
    prctl(PR_SET_TIMERSLACK, 1); /* else every wake-up is 50 us late */
    for (int i = 0; i < host_count; i++) {
        hosts[i].tun = open_tun(argv[3 + i], home);
        hosts[i].up.random_state = seed * 1000003 + 2 * (uint64_t)i;
        hosts[i].down.random_state = seed * 1000003 + 2 * (uint64_t)i + 1;
        chance(&hosts[i].up.random_state);
        watch(poll, hosts[i].tun, (uint32_t)i);
    }
    enum { TIMER = HOSTS_MAX, COMMANDS };
    watch(poll, timer, TIMER);
    watch(poll, STDIN_FILENO, COMMANDS);
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        struct epoll_event events[HOSTS_MAX + 2];
        int count = epoll_wait(poll, events, HOSTS_MAX + 2, -1);
        if (count < 0 && errno != EINTR)
            die("epoll_wait");
        for (int i = 0; i < count; i++) {
            uint32_t number = events[i].data.u32;
            if (number == COMMANDS) {
                if (!take_commands())
                    return 0;
            } else if (number == TIMER) {
                uint64_t expirations;
                if (read(timer, &expirations, sizeof expirations) < 0 && errno != EAGAIN)
                    die("reading the timer");
                armed_ns = 0;
            } else {
                take_packets(&hosts[number]);
            }
        }
        arm(timer, move_due(now_ns()));
    }
}
