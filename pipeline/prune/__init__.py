"""A checkpoint without some of its experts, in the released form, for engines that read it."""
