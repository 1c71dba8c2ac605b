# usage: wait.pl SECONDS RESULTS: waits as Perl does, and tells how long it took; see ../waits.c
use strict;
use warnings;
use Time::HiRes qw(clock_gettime CLOCK_MONOTONIC);
my ($seconds, $results) = @ARGV;
my %waits = (
    perl_sleep  => sub { sleep $seconds },
    perl_select => sub { select undef, undef, undef, $seconds },
    perl_hires  => sub { Time::HiRes::sleep($seconds) },
);
for my $name (keys %waits) {
    next if fork;
    my $began = clock_gettime(CLOCK_MONOTONIC);
    $waits{$name}->();
    my $lasted = int(1e6 * (clock_gettime(CLOCK_MONOTONIC) - $began));
    open my $file, '>>', $results or die $!;
    syswrite $file, "$name main 1 0 $lasted\n";
    exit 0;
}
1 while wait != -1;
