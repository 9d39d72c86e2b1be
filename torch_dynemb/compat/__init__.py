"""Names of other libraries, so that existing code keeps working."""
