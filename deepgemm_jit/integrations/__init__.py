"""Other people's libraries, reached from here and imported only when asked for."""
