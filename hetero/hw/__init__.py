"""What this machine has: processors, memory. Reads sysfs, procfs and cgroups; imports no torch."""
