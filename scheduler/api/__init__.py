"""The runtime's interface for programs: handles and tasks, recorded steps and their tickets, placement on workers."""
