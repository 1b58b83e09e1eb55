"""Data movement of chains: loop schedules, tiles, footprints, volumes and exchanges, by formula."""
