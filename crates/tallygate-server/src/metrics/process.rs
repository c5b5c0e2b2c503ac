//! Metrics of the process, with the names that all Prometheus clients use.

use std::fmt;
use std::sync::LazyLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use super::families::Families;

/// When the process started, to within the time that it takes to start a server.
static STARTED: LazyLock<SystemTime> = LazyLock::new(SystemTime::now);

/// Reads the metrics of the process when they are requested. What the system does not tell is left out.
#[derive(Debug)]
pub(super) struct Process;

impl Process {
    pub(super) fn new() -> Self {
        LazyLock::force(&STARTED);
        Self
    }
}

impl Collector for Process {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut families = Families::new(encoder);
        let cpu = clock_gettime(ClockId::ProcessCPUTime);
        let cpu = Duration::try_from(cpu).unwrap_or_default();
        families.counter(
            "cpu_seconds",
            "Processor time used by the process",
            &cpu.as_secs_f64(),
        )?;
        let started = STARTED.duration_since(UNIX_EPOCH).unwrap_or_default();
        families.gauge(
            "start_time_seconds",
            "When the process started, as Unix time",
            &started.as_secs_f64(),
        )?;
        // Reading the folder opens one more descriptor.
        if let Ok(open) = std::fs::read_dir("/proc/self/fd") {
            families.gauge("open_fds", "Open file descriptors", &open.count().saturating_sub(1))?;
        }
        if let Some(most) = getrlimit(Resource::Nofile).current {
            families.gauge("max_fds", "Maximum number of open file descriptors", &most)?;
        }
        let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return Ok(()) };
        for (line, name, help, unit) in [
            ("VmSize:", "virtual_memory_bytes", "Virtual memory of the process", 1024),
            ("VmRSS:", "resident_memory_bytes", "Resident memory of the process", 1024),
            ("Threads:", "threads", "Threads of the process", 1),
        ] {
            if let Some(value) = value_of(&status, line) {
                families.gauge(name, help, &(value * unit))?;
            }
        }
        Ok(())
    }
}

/// Returns the number in a line of `/proc/self/status`.
fn value_of(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}
