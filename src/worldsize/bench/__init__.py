"""Measuring: whole runs of worldsize, compared with each other in one sitting."""
