// The emulated GPU's race detector alone, without TensorFlow: runs the commands of its input, a line each, and prints what
// it reports. test_race_detector.py has the programs.

#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "race_detector.h"

using emulated_gpu::Clock;
using emulated_gpu::RaceDetector;
using emulated_gpu::Range;

int main() {
  RaceDetector& detector = RaceDetector::Get();
  std::map<std::string, int> streams{{"host", 0}};
  std::map<std::string, Clock> events;
  std::string line, word, name;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    if (!(words >> word)) continue;
    if (word == "stream") {
      words >> name;
      streams[name] = detector.AddStream(name);
    } else if (word == "wait") {  // STREAM OTHER
      std::string other;
      words >> name >> other;
      detector.StreamWaits(streams.at(name), streams.at(other));
    } else if (word == "record") {  // EVENT STREAM
      std::string stream;
      words >> name >> stream;
      events[name] = detector.ClockOf(streams.at(stream));
    } else if (word == "wait_event") {  // STREAM EVENT
      std::string event;
      words >> name >> event;
      detector.StreamWaits(streams.at(name), events.at(event));
    } else if (word == "see") {  // EVENT
      words >> name;
      detector.HostSees(events.at(name));
    } else if (word == "run" || word == "free") {  // STREAM NAME [r|w BEGIN END]...
      std::string stream, mode;
      std::vector<Range> reads, writes;
      Range range{};
      words >> stream >> name;
      while (words >> mode >> range.begin >> range.end) (mode == "r" ? reads : writes).push_back(range);
      if (word == "run") {
        detector.Enqueue(streams.at(stream), name, reads, writes);
      } else {
        detector.Free(streams.at(stream), name, writes.at(0));
      }
    } else if (word == "forget") {  // BEGIN END
      Range range{};
      words >> range.begin >> range.end;
      detector.Forget(range);
    } else {
      std::cerr << "unknown: " << line << "\n";
      return 2;
    }
  }
  std::cout << detector.report();
  return 0;
}
