"""Passes over the model: schedules, lockstep, restarts of a sweep, kept graphs, the ledger."""
