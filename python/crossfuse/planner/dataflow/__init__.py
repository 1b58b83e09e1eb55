"""What moves: loop schedules, footprints, volumes, exchanges and places, by formula and by walk."""
