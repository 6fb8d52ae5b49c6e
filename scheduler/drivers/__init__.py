"""Drivers carry out the machine's actions: CPU threads, copy engines of simulated devices, virtual time."""
